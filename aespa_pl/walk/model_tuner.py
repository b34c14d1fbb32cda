"""Train the model end to end after the last block, and write again all that it has changed."""

import copy
import gc
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from aespa_pl.algorithm.quantizer import StoredWeight
from aespa_pl.errors import UserError
from aespa_pl.measure import release_memory
from aespa_pl.models.headers import DTYPES
from aespa_pl.run.context import Context
from aespa_pl.run.fingerprint import checksum
from aespa_pl.run.journal import Run
from aespa_pl.run.model_writer import ModelWriter
from aespa_pl.run.training import Training
from aespa_pl.storage.batches import Batches
from aespa_pl.storage.files import read_tensors, write_tensors
from aespa_pl.tuning import (
    EVERYTHING,
    SCALES,
    LearningRates,
    SegmentPairs,
    TunableBlock,
    Tuned,
    changed_fraction,
    divergence,
    tune,
    tune_streamed,
)
from aespa_pl.tuning.moving import Moves, moved
from aespa_pl.tuning.streamed import TrainableStream
from aespa_pl.tuning.weights import (
    merged,
    parametrize_block,
    parametrize_vectors,
    quantized_weights,
    remove_parametrizations,
)
from aespa_pl.walk import record
from aespa_pl.walk.block_tuner import stored_types
from aespa_pl.walk.stem import stem_tensors


@dataclass(frozen=True)
class ModelTuner:
    """Tunes the quantized model of a run end to end."""

    context: Context
    writer: ModelWriter
    """Knows the files of the quantized blocks."""

    def tune(self, tokens: Tensor, hidden: Batches) -> Tuned:
        """Tune the model, and write what was learned to one file of the run.

        Args:
            tokens: Calibration segments of all processes, ``[segments, L]``.
            hidden: The original's hidden states after its last block, of this process's segments.
        """
        context, source, world = self.context, self.context.source, self.context.world
        world.wait_for_all()  # for the files of the last block
        settings, count = context.settings.tuning.model, source.block_count
        training = Training(count, "model", "end_to_end", processes=world.size)
        pairs = SegmentPairs(
            list(world.segments(tokens, context.batch_size).split(context.batch_size)),
            hidden,
            batch_size=settings.batch_size,
            held_back=context.settings.tuning.held_back,
            seed=count,
            world=world,
        )
        model = self._model()
        streamed = settings.blocks == "disk"
        original_head = partial(source.family.head, source.model)
        rates = LearningRates(
            cast(float, settings.integer_rate),
            cast(float, settings.scale_rate),
            settings.bias_rate,
            bits=context.settings.bits,
        )
        with source.stem():
            train = partial(
                tune_streamed if streamed else tune,
                pairs=pairs,
                loss=divergence(original_head, one_by_one=streamed),
                rates=rates,
                trainer=context.trainers.of_tuning(context.run, training, settings.epochs),
                checkpoint=world.from_first(lambda: context.run.checkpoint_to_continue(training)),
            )
            checksums: dict[str, str] = {}
            if streamed:
                moves = Moves(context.run.moved_folder, rates.of_latent, world)
                found, learned = self._tune_streamed(model, train, moves if rates.latent else None)
                if rates.latent and moves.step and world.is_first:
                    files = map(moves.file, range(count))
                    checksums = {f.relative_to(context.run.folder).as_posix(): checksum(f) for f in files}
            else:
                found, learned = self._tune_in_memory(model, train)
        world.wait_for_all()  # the first one replaces files that others read
        if world.is_first:
            write_tensors(context.run.tuned_file, learned, checksums)
            context.run.finish_tuning(record.tuning(found))
        del model, train
        gc.collect()  # Trainer, module and optimizer refer to each other
        release_memory()
        return found

    def _tune_in_memory(
        self, model: PreTrainedModel, train: Callable[..., Tuned]
    ) -> tuple[Tuned, dict[str, Tensor]]:
        """Tune all blocks at once; return what was found, and the learned tensors by name."""
        indices, file = range(self.context.source.block_count), self.context.run.block_file
        blocks = [self._block(model, index, load_file(file(index))) for index in indices]
        found = train(
            blocks,
            recipe=EVERYTHING if self.context.settings.tuning.model.integer_rate else SCALES,
            model=model,
            outside=self._outside(model),
            recompute=self.context.recompute,
        )
        learned = self._vectors(model)
        for index, weights in enumerate(found.weights):
            stored = record.weight_tensors(weights)
            learned |= {_key(index, name): tensor for name, tensor in stored.items()}
        return found, learned

    def _tune_streamed(
        self, model: PreTrainedModel, train: Callable[..., Tuned], moves: Moves | None
    ) -> tuple[Tuned, dict[str, Tensor]]:
        """Tune with one block in memory; return the same, without integers."""
        source = self.context.source
        parametrize_vectors(model, self._outside(model))
        shells = cast(nn.ModuleList, model.get_submodule(source.family.blocks_path))

        def read(index: int) -> dict[str, Tensor]:
            return read_tensors(self.context.run.block_file(index))

        def make(index: int, stored: Mapping[str, Tensor]) -> nn.Module:
            empty = shells[index]
            shells[index] = copy.deepcopy(empty)
            tunable = self._block(model, index, stored)
            shells[index] = empty  # so that the model doesn't hold what was read
            parametrize_block(tunable, SCALES if moves is None else EVERYTHING)
            return tunable.block

        streamed = TrainableStream(model, source.family, read, make, moves)
        found = train(streamed)
        learned: dict[str, Tensor] = {}
        changed = []
        for index in range(source.block_count):
            prefix = source.family.block_prefix(index)
            with streamed.block(index) as (block, _):
                weights = quantized_weights(block, self.context.layout(index))
                before = self._weights(index, load_file(self.context.run.block_file(index)))
                on_host = {name: replace(q, integers=q.integers.cpu()) for name, q in weights.items()}
                changed.append(changed_fraction([before], [on_host]))
                remove_parametrizations(block)
                learned |= self._vectors(block, prefix)
            learned |= {
                _key(index, name): tensor
                for name, tensor in record.weight_tensors(weights).items()
                if not name.endswith(".integers")
            }
        remove_parametrizations(model)
        found = replace(found, changed=sum(changed) / len(changed))
        return found, learned | self._vectors(model)

    def rewrite(self) -> None:
        """Write the blocks that do not hold yet what was learned, and what lies outside of them."""
        source, run = self.context.source, self.context.run
        learned = load_file(run.tuned_file)
        for index in range(source.block_count):
            if not run.blocks[index].end_to_end:
                self._rewrite_block(index, learned, offsets(run, index))
        shutil.rmtree(run.moved_folder, ignore_errors=True)
        stem = stem_tensors(self.context)
        self.writer.write_stem({name: learned.get(name, tensor) for name, tensor in stem.items()})

    def _model(self) -> PreTrainedModel:
        """Return the model in float32, on the device, without its blocks."""
        source = self.context.source
        pretrained = self.context.quantized_stem.pretrained
        model: PreTrainedModel = pretrained.skeleton()
        pretrained.load_stem(model, source.family, self.context.device, torch.float32)
        return model

    def _block(self, model: PreTrainedModel, index: int, stored: Mapping[str, Tensor]) -> TunableBlock:
        """Load a quantized block, whose file holds what is ``stored``, into a model, in float32."""
        source, device, layout = self.context.source, self.context.device, self.context.layout(index)
        unread = {f"{p.module}.weight" for p in layout.projections}  # the integers say all of these
        pretrained = source.pretrained.with_block(source.family, index, self.writer.block_files(index))
        return TunableBlock(
            pretrained.load_block(model, source.family, index, device, torch.float32, unread=unread),
            layout,
            self._weights(index, {name: tensor.to(device) for name, tensor in stored.items()}),
            stored_types(source, index),
        )

    def _outside(self, model: PreTrainedModel) -> dict[str, torch.dtype]:
        """Return the stored types of the norms and biases outside of the blocks, by name."""
        types, inside = self._types(), f"{self.context.source.family.blocks_path}."
        vectors = [name for name, parameter in model.named_parameters() if parameter.dim() == 1]
        return {name: types[name] for name in vectors if not name.startswith(inside)}

    def _types(self) -> dict[str, torch.dtype]:
        tensors = self.context.source.pretrained.tensors
        return {name: DTYPES[stored.dtype] for name, stored in tensors.items()}

    def _weights(self, index: int, tensors: Mapping[str, Tensor]) -> dict[str, StoredWeight]:
        """Return what the file of a block holds, by projection."""
        settings = self.context.settings
        names = [p.name for p in self.context.layout(index).projections]
        return {
            name: record.read_weight(
                tensors, name, settings.bits_for(index, name), settings.type_for(index, name)
            )
            for name in names
        }

    def _vectors(self, module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
        """Return the norms and biases of a model, or of a block, by their names and as they are stored."""
        types = self._types()
        vectors = {prefix + name: p for name, p in module.named_parameters() if p.dim() == 1}
        return {n: p.detach().to(types[n]) for n, p in vectors.items() if not p.is_meta}

    def _rewrite_block(
        self, index: int, learned: Mapping[str, Tensor], offsets: Mapping[str, Tensor]
    ) -> None:
        """Replace the files of a block by new ones, all at once."""
        run, layout, source = self.context.run, self.context.layout(index), self.context.source
        family, file, shards = source.family, run.block_file(index), self.writer.block_files(index)
        tensors, complete = load_file(file), source.pretrained.with_block(family, index, shards)
        shard = {name: complete.tensor(name) for name in complete.block_names(family, index)}
        tensors |= {name: learned[key] for name in tensors if (key := _key(index, name)) in learned}
        quantized = self._weights(index, tensors)
        if offsets:
            quantized = moved(quantized, layout, offsets)
            tensors |= {f"{name}.integers": q.integers for name, q in quantized.items()}
        weights = {name: q.weight() for name, q in quantized.items()}
        prefix, types = family.block_prefix(index), stored_types(source, index)
        shard |= {name: learned[name] for name in shard if name in learned}
        for path in {p.module: None for p in layout.projections}:
            name = f"{path}.weight"
            shard[prefix + name] = merged(weights, layout, path).to(types[name])
        done = run.blocks[index]
        metadata = record.metadata(done.losses, done.tuning, self.context.types(index))
        write_tensors(run.staged(file), tensors, metadata)
        staged = replace(self.writer, folder=run.staged(self.writer.folder))
        staged.write_block(index, family.as_stored(shard))
        run.replace_block(index, (file, *shards))


def _key(index: int, name: str) -> str:
    return f"block_{index:03}.{name}"


def offsets(run: Run, index: int) -> dict[str, Tensor]:
    """Return how far the integers of a block have moved on disk; nothing where none have.

    Raises:
        UserError: The file is missing, or another than the one that the tuning has left.
    """
    with safe_open(run.tuned_file, "pt") as file:
        checksums: dict[str, str] = file.metadata() or {}
    if not checksums:
        return {}
    name = sorted(checksums)[index]
    if not (run.folder / name).is_file() or checksum(run.folder / name) != checksums[name]:
        raise UserError(
            f"{run.folder / name} is missing or changed: remove {run.tuned_file}, and all blocks are "
            "quantized again"
        )
    return load_file(run.folder / name)
