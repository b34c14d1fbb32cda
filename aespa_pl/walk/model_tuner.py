"""Train the model end to end after the last block, and write again all that it has changed."""

import copy
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from aespa_pl.algorithm.quantizer import StoredWeight, read_weight, weight_tensors
from aespa_pl.errors import UserError
from aespa_pl.models.headers import DTYPES
from aespa_pl.run.checkpointing import read_checkpoint
from aespa_pl.run.context import Context
from aespa_pl.run.folder import Training
from aespa_pl.run.journal import Run
from aespa_pl.run.model_writer import ModelWriter
from aespa_pl.storage.batches import Batches
from aespa_pl.storage.files import read_tensors, write_tensors
from aespa_pl.tuning.data import SegmentPairs
from aespa_pl.tuning.losses import divergence
from aespa_pl.tuning.moving import Moves, moved
from aespa_pl.tuning.streamed import TrainableStream
from aespa_pl.tuning.training import STATE, LearningRates
from aespa_pl.tuning.tune import Tuned, changed_fraction, tune, tune_streamed
from aespa_pl.tuning.weights import (
    EVERYTHING,
    SCALES,
    TunableBlock,
    layers_of,
    merged,
    parametrize_block,
    parametrize_vectors,
    quantized_weights,
    remove_parametrizations,
)
from aespa_pl.walk.block_tuner import stored_types, vectors
from aespa_pl.walk.stem import stem_tensors

log = logging.getLogger(__name__)

Train = Callable[..., Tuned]
Found = tuple[Tuned, dict[str, Tensor]]  # what a tuning found, and the learned tensors by name


@dataclass(frozen=True)
class ModelTuner:
    """Tunes the quantized model of a run end to end."""

    context: Context
    writer: ModelWriter  # of the quantized blocks

    def tune(self, tokens: Tensor, hidden: Batches) -> tuple[Tuned, list[Path]]:
        """Tune the model on all segments ``[segments, L]``, and write what was learned to a file of the run.

        ``hidden`` are the original's hidden states after its last block, of this process's segments. The
        files that are returned tell how far the integers of each block have moved on disk.
        """
        context, source, world = self.context, self.context.source, self.context.world
        world.wait_for_all()  # for the files of the last block
        settings, count = context.settings.tuning.model, source.block_count
        streamed = settings.blocks == "disk"
        # targets are hidden states, which are another dtype's
        name = f"model{', blocks on disk' if streamed else ''} in {source.dtype}"
        training = Training(count, name, "end_to_end", division=context.division)
        pairs = SegmentPairs(
            list(world.segments(tokens, context.batch_size).split(context.batch_size)),
            hidden,
            batch_size=settings.batch_size,
            held_back=context.settings.tuning.held_back,
            seed=count,
            world=world,
        )
        # in float32, on the device, without its blocks
        pretrained = context.quantized_stem.pretrained
        model = pretrained.skeleton()
        pretrained.load_stem(model, context.device, torch.float32, whole=not streamed)
        rates = LearningRates(
            cast(float, settings.integer_rate),
            cast(float, settings.scale_rate),
            settings.bias_rate,
            bits=context.settings.bits,
        )
        moves = None
        if streamed and rates.latent:
            moves = Moves(context.run.moved_folder, rates.of_latent, world, self._saved)
        with source.stem():
            train = partial(
                tune_streamed if streamed else tune,
                pairs=pairs,
                loss=divergence(partial(source.family.head, source.model), one_by_one=streamed),
                rates=rates,
                trainer=context.trainers.of_tuning(context.run, training, settings.epochs),
                products=context.settings.precision,
                checkpoint=world.from_first(partial(self._checkpoint, training, moves, pairs.steps)),
            )
            if streamed:
                found, learned = self._tune_streamed(model, train, moves)
            else:
                found, learned = self._tune_in_memory(model, train)
        del model, train, pairs  # the pairs know the Trainer, and so all that it has trained
        context.free_memory()
        world.wait_for_all()  # the first one replaces files that others read
        if world.is_first:
            write_tensors(context.run.tuned_file, learned, {})
        if moves is None or not moves.step:
            return found, []
        return found, [moves.file(index) for index in range(count)]

    def _checkpoint(self, training: Training, moves: Moves | None, steps: int) -> Path | None:
        """Return the checkpoint to continue; where integers move, there is none without their files.

        An epoch has so many ``steps``.
        """
        run = self.context.run
        found = run.checkpoint_to_continue(training)
        if moves is not None and found is not None:
            content = read_checkpoint(found, mmap=True)
            needed = {content["global_step"], content[STATE]["best_epoch"] * steps}
            if not moves.has(needed, self.context.source.block_count):
                log.warning("%s lacks a file, or has a damaged one: the tuning starts again", moves.folder)
                found = None
        if moves is not None and found is None:  # the first step removes what another one needs
            run.forget_checkpoint()
        return found

    def _saved(self) -> int | None:
        """Return the optimizer steps of the checkpoint that the run has."""
        checkpoint = self.context.run.checkpoint
        return None if checkpoint is None else checkpoint.step

    def _tune_in_memory(self, model: PreTrainedModel, train: Train) -> Found:
        """Tune all blocks at once."""
        indices, file = range(self.context.source.block_count), self.context.run.block_file
        found = train(
            [self._block(model, index, load_file(file(index))) for index in indices],
            recipe=EVERYTHING if self.context.settings.tuning.model.integer_rate else SCALES,
            model=model,
            outside=self._outside(model),
            recompute=self.context.recompute,
        )
        learned = self._vectors(model)
        for index, weights in enumerate(found.weights):
            stored = weight_tensors(weights)
            learned |= {_key(index, name): tensor for name, tensor in stored.items()}
        return found, learned

    def _tune_streamed(self, model: PreTrainedModel, train: Train, moves: Moves | None) -> Found:
        """Tune with one block in memory; no integers are among what is returned."""
        source = self.context.source
        parametrize_vectors(model, self._outside(model))
        shells = cast(nn.ModuleList, model.get_submodule(source.family.blocks_path))

        def make(index: int, stored: Mapping[str, Tensor]) -> nn.Module:
            empty = shells[index]
            shells[index] = copy.deepcopy(empty)
            tunable = self._block(model, index, stored)
            shells[index] = empty  # so that the model doesn't hold what was read
            parametrize_block(tunable, SCALES if moves is None else EVERYTHING)
            return tunable.block

        file = self.context.run.block_file
        streamed = TrainableStream(model, source.family, lambda index: read_tensors(file(index)), make, moves)
        found, changed, count = train(streamed), 0.0, 0
        learned: dict[str, Tensor] = {}
        for index in range(source.block_count):
            with streamed.block(index) as (block, _):
                weights = quantized_weights(block, self.context.layout(index))
                before = self._weights(index, load_file(file(index)))
                on_host = {name: replace(q, integers=q.integers.cpu()) for name, q in weights.items()}
                size = sum(q.integers.numel() for q in before.values())
                changed += changed_fraction([before], [on_host]) * size
                count += size
                remove_parametrizations(block)
                learned |= self._vectors(block, source.family.block_prefix(index))
            stored = weight_tensors(weights)
            learned |= {_key(index, n): tensor for n, tensor in stored.items() if not n.endswith(".integers")}
        remove_parametrizations(model)
        return replace(found, changed=changed / max(1, count)), learned | self._vectors(model)

    def rewrite(self) -> None:
        """Write the blocks that do not hold yet what was learned, and what lies outside of them."""
        source, run = self.context.source, self.context.run
        learned = load_file(run.tuned_file)
        for index in range(source.block_count):
            if not run.blocks[index].end_to_end:
                self._rewrite_block(index, learned)
        shutil.rmtree(run.moved_folder, ignore_errors=True)
        stem = stem_tensors(self.context).items()
        self.writer.write_stem({name: learned.get(name, tensor) for name, tensor in stem})

    def _block(self, model: PreTrainedModel, index: int, stored: Mapping[str, Tensor]) -> TunableBlock:
        """Load a quantized block, whose file holds what is ``stored``, into a model, in float32."""
        source, device, layout = self.context.source, self.context.device, self.context.layout(index)
        unread = {f"{p.module}.weight" for p in layout.projections}  # the integers say all of these
        pretrained = source.pretrained.with_block(index, self.writer.block_file(index))
        return TunableBlock(
            pretrained.load_block(model, index, device, torch.float32, unread=unread),
            layout,
            self._weights(index, {name: tensor.to(device) for name, tensor in stored.items()}),
            stored_types(source, index),
        )

    def _outside(self, model: PreTrainedModel) -> dict[str, torch.dtype]:
        """Return the stored types of the norms and biases outside of the blocks, by name."""
        tensors, inside = self.context.source.pretrained.tensors, f"{self.context.source.family.blocks_path}."
        return {n: DTYPES[tensors[n].dtype] for n in vectors(model) if not n.startswith(inside)}

    def _weights(self, index: int, tensors: Mapping[str, Tensor]) -> dict[str, StoredWeight]:
        """Return what the file of a block holds, by projection."""
        bits, types = self.context.settings.bits_for, self.context.types(index)
        return {name: read_weight(tensors, name, bits(index, name), types[name]) for name in types}

    def _vectors(self, module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
        """Return the norms and biases of a model, or of a block, by their names and as they are stored."""
        tensors, here = self.context.source.pretrained.tensors, vectors(module)
        found = {prefix + name: p.detach() for name, p in here.items() if not p.is_meta}
        return {name: p.to(DTYPES[tensors[name].dtype]) for name, p in found.items()}

    def _rewrite_block(self, index: int, learned: Mapping[str, Tensor]) -> None:
        """Replace both files of a block by new ones, all at once."""
        run, layout, source = self.context.run, self.context.layout(index), self.context.source
        family, file, model_file = source.family, run.block_file(index), self.writer.block_file(index)
        tensors, complete = load_file(file), source.pretrained.with_block(index, model_file)
        prefix = family.block_prefix(index)
        matrices = {f"{prefix}{path}.weight": each for path, each in layers_of(layout).items()}
        names = [name for name in complete.block_names(index) if name not in matrices]
        stored = {name: complete.tensor(name) for name in names}
        tensors |= {name: learned[key] for name in tensors if (key := _key(index, name)) in learned}
        quantized = self._weights(index, tensors)
        if distances := offsets(run, index):
            quantized = moved(quantized, layout, distances)
            tensors |= {f"{name}.integers": q.integers for name, q in quantized.items()}
        stored |= {name: learned[name] for name in stored if name in learned}
        for name, projections in matrices.items():
            weights = {p.name: quantized[p.name].weight() for p in projections}
            value = merged(weights, layout, projections)
            stored[name] = value.to(DTYPES[complete.tensors[name].dtype])
        write_tensors(run.staged(file), tensors, {})
        staged = replace(self.writer, folder=run.staged(self.writer.folder))
        staged.write_block(index, family.as_stored(stored))
        run.replace_block(index, (file, model_file))


def _key(index: int, name: str) -> str:
    return f"block_{index:03}.{name}"


def offsets(run: Run, index: int) -> dict[str, Tensor]:
    """Return how far the integers of a block have moved on disk; nothing where none have.

    Raises UserError where the file is missing, or another than the one that the tuning has left.
    """
    files = {} if run.tuned is None else run.tuned.moved
    if not files:
        return {}
    name = next((name for name in files if Path(name).name == Moves.name(index)), "")
    if not run.is_whole(name, files.get(name, "")):
        raise UserError(
            f"{run.folder / name} is missing or changed: remove {run.tuned_file}, and all blocks are "
            "quantized again"
        )
    return load_file(run.folder / name)
