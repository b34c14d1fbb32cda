"""Train the model end to end after the last block, and write again all that it has changed."""

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from aespa_pl.algorithm.quantizer import StoredWeight
from aespa_pl.measure import release_memory
from aespa_pl.models.headers import DTYPES
from aespa_pl.models.pretrained import PretrainedFolder
from aespa_pl.run.context import Context
from aespa_pl.run.model_writer import ModelWriter
from aespa_pl.run.training import Training
from aespa_pl.storage.batches import Batches
from aespa_pl.storage.files import write_tensors
from aespa_pl.tuning import (
    EVERYTHING,
    SCALES,
    LearningRates,
    SegmentPairs,
    TunableBlock,
    Tuned,
    divergence,
    tune,
)
from aespa_pl.tuning.weights import merged
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
        files = {index: self.writer.block_file(index) for index in range(count)}
        model, blocks = self._load(
            context.quantized_stem.pretrained.with_blocks(source.family, files)
        )
        pairs = SegmentPairs(
            list(world.segments(tokens, context.batch_size).split(context.batch_size)),
            hidden,
            batch_size=settings.batch_size,
            held_back=context.settings.tuning.held_back,
            seed=count,
            world=world,
        )
        with source.stem():
            found = tune(
                blocks,
                pairs,
                loss=divergence(lambda states: source.family.head(source.model, states)),
                rates=LearningRates(
                    cast(float, settings.integer_rate),
                    cast(float, settings.scale_rate),
                    settings.bias_rate,
                    bits=context.settings.bits,
                ),
                trainer=context.trainers.of_tuning(context.run, training, settings.epochs),
                label="the model",
                recipe=EVERYTHING if settings.integer_rate else SCALES,
                checkpoint=world.from_first(lambda: context.run.checkpoint_to_continue(training)),
                model=model,
                outside=self._outside(model),
                recompute=context.recompute,
            )
        if world.is_first:
            write_tensors(context.run.tuned_file, self._learned(model, found), {})
            context.run.finish_tuning(record.tuning(found))
        del model, blocks
        gc.collect()  # Trainer, module and optimizer refer to each other
        release_memory()
        return found

    def rewrite(self) -> None:
        """Write the blocks that do not hold yet what was learned, and what lies outside of them."""
        source, run = self.context.source, self.context.run
        learned = load_file(run.tuned_file)
        for index in range(source.block_count):
            if not run.blocks[index].end_to_end:
                self._rewrite_block(index, learned)
        stem = stem_tensors(self.context)
        self.writer.write_stem({name: learned.get(name, tensor) for name, tensor in stem.items()})

    def _load(self, pretrained: PretrainedFolder) -> tuple[PreTrainedModel, list[TunableBlock]]:
        """Return the quantized model in float32, on the device, and its blocks.

        Args:
            pretrained: The model's folder, with the tensors of all blocks where their quantized values lie.
        """
        source, device, run = self.context.source, self.context.device, self.context.run
        model: PreTrainedModel = pretrained.skeleton()
        pretrained.load_stem(model, source.family, device, torch.float32)
        blocks = [
            TunableBlock(
                pretrained.load_block(model, source.family, index, device, torch.float32),
                self.context.layout(index),
                self._weights(index, load_file(run.block_file(index), str(device))),
                stored_types(source, index),
            )
            for index in range(source.block_count)
        ]
        return model, blocks

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

    def _learned(self, model: PreTrainedModel, found: Tuned) -> dict[str, Tensor]:
        """Return integers and scales by block and projection; norms and biases by their names."""
        tensors: dict[str, Tensor] = {}
        for index, weights in enumerate(found.weights):
            stored = record.weight_tensors(weights)
            tensors |= {_key(index, name): tensor for name, tensor in stored.items()}
        types = self._types()
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                tensors[name] = parameter.to(types[name])
        return tensors

    def _rewrite_block(self, index: int, learned: Mapping[str, Tensor]) -> None:
        """Replace the two files of a block by new ones, both at once."""
        run, layout, source = self.context.run, self.context.layout(index), self.context.source
        family, files = source.family, (run.block_file(index), self.writer.block_file(index))
        tensors, complete = (
            load_file(files[0]),
            source.pretrained.with_blocks(family, {index: files[1]}),
        )
        shard = {name: complete.tensor(name) for name in complete.block_names(family, index)}
        tensors |= {name: learned[key] for name in tensors if (key := _key(index, name)) in learned}
        weights = {name: q.weight() for name, q in self._weights(index, tensors).items()}
        prefix, types = family.block_prefix(index), stored_types(source, index)
        shard |= {name: learned[name] for name in shard if name in learned}
        for path in {p.module: None for p in layout.projections}:
            name = f"{path}.weight"
            shard[prefix + name] = merged(weights, layout, path).to(types[name])
        done = run.blocks[index]
        metadata = record.metadata(done.losses, done.tuning, self.context.types(index))
        write_tensors(run.staged(files[0]), tensors, metadata)
        write_tensors(run.staged(files[1]), family.as_stored(shard), {"format": "pt"})
        run.replace_block(index, files)


def _key(index: int, name: str) -> str:
    return f"block_{index:03}.{name}"
