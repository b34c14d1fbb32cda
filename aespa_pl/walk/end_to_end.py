"""Train the model end to end after the last block, and write again all that it has changed."""

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from aespa_pl.distributed.processes import ALONE, World
from aespa_pl.measure import release_memory
from aespa_pl.models.headers import DTYPES
from aespa_pl.models.pretrained import PretrainedFolder
from aespa_pl.models.streamed import StreamedModel
from aespa_pl.run.journal import Run
from aespa_pl.run.model_writer import ModelWriter
from aespa_pl.settings import QuantizationSettings
from aespa_pl.storage.batches import Batches
from aespa_pl.storage.files import write_tensors
from aespa_pl.tuning import (
    LearningRates,
    QuantizedWeight,
    SegmentPairs,
    TunableModel,
    TunedModel,
    tune_model,
)
from aespa_pl.tuning.weights import merged
from aespa_pl.walk import record
from aespa_pl.walk.tuning import MakeTuningTrainer, stored_types, tuning_portion


@dataclass(frozen=True)
class ModelTuner:
    """Tunes the quantized model of a run end to end."""

    source: StreamedModel
    """Original model."""
    run: Run
    settings: QuantizationSettings
    make_trainer: MakeTuningTrainer
    recompute: bool
    """Whether each block runs once more in the backward pass, which takes less memory."""
    world: World = ALONE
    """The processes; each has the hidden states of its segments, and the first writes."""

    def tune(
        self, tokens: Tensor, hidden: Batches, batch_size: int, writer: ModelWriter
    ) -> TunedModel:
        """Tune the model, and write what was learned to one file of the run.

        Args:
            tokens: Calibration segments of all processes, ``[segments, L]``.
            hidden: The original's hidden states after its last block, of this process's segments.
            batch_size: Segments in a batch of ``hidden``.
            writer: Knows the files of the quantized blocks.
        """
        self.world.wait_for_all()  # for the files of the last block
        settings, count, world = self.settings.tuning.model, self.source.block_count, self.world
        portion = tuning_portion(count, "model", world)
        files = {index: writer.block_file(index) for index in range(count)}
        tunable = self._load(self.source.pretrained.with_blocks(self.source.family, files))
        pairs = SegmentPairs(
            list(world.segments(tokens, batch_size).split(batch_size)),
            hidden,
            batch_size=settings.batch_size,
            held_back=self.settings.tuning.held_back,
            seed=count,
            world=world,
        )
        with self.source.stem():
            found = tune_model(
                tunable,
                pairs,
                head=lambda states: self.source.family.head(self.source.model, states),
                rates=LearningRates(
                    cast(float, settings.integer_rate),
                    cast(float, settings.scale_rate),
                    settings.bias_rate,
                    bits=self.settings.bits,
                ),
                trainer=self.make_trainer(portion, settings.epochs),
                checkpoint=world.from_first(lambda: self.run.checkpoint_to_continue(portion)),
                recompute=self.recompute,
            )
        if world.is_first:
            write_tensors(self.run.tuned_file, self._learned(tunable, found), {})
            self.run.finish_tuning(record.tuning(found))
        del tunable
        gc.collect()  # Trainer, module and optimizer refer to each other
        release_memory()
        return found

    def rewrite(self, writer: ModelWriter) -> None:
        """Write the blocks that do not hold yet what was learned, and what lies outside of them."""
        learned = load_file(self.run.tuned_file)
        pretrained, family = self.source.pretrained, self.source.family
        for index in range(self.source.block_count):
            if not self.run.blocks[index].end_to_end:
                self._rewrite_block(index, learned, writer)
        stem = {name: pretrained.tensor(name) for name in pretrained.stem_names(family)}
        writer.write_stem({name: learned.get(name, tensor) for name, tensor in stem.items()})

    def _load(self, pretrained: PretrainedFolder) -> TunableModel:
        """Return the quantized model in float32, on the device.

        Args:
            pretrained: The model's folder, with the tensors of all blocks where their quantized values lie.
        """
        family, device = self.source.family, self.source.device
        model: PreTrainedModel = pretrained.skeleton()
        pretrained.load_stem(model, family, device, torch.float32)
        blocks = [
            pretrained.load_block(model, family, index, device, torch.float32)
            for index in range(self.source.block_count)
        ]
        weights = [
            self._weights(index, load_file(self.run.block_file(index), str(device)))
            for index in range(self.source.block_count)
        ]
        types = {name: DTYPES[stored.dtype] for name, stored in pretrained.tensors.items()}
        return TunableModel(model, blocks, family.layout(pretrained.config), weights, types)

    def _weights(self, index: int, tensors: Mapping[str, Tensor]) -> dict[str, QuantizedWeight]:
        """Return what the file of a block holds, by projection."""
        layout = self.source.family.layout(self.source.pretrained.config)
        return {
            p.name: QuantizedWeight(
                tensors[f"{p.name}.integers"],
                tensors[f"{p.name}.scale"].float(),
                tensors[f"{p.name}.zero_point"].float(),
                self.settings.bits_for(index, p.name),
            )
            for p in layout.projections
        }

    def _learned(self, tunable: TunableModel, found: TunedModel) -> dict[str, Tensor]:
        """Return integers and scales by block and projection; norms and biases by their names."""
        tensors = {}
        for index, weights in enumerate(found.weights):
            for name, q in weights.items():
                tensors[_key(index, name, "scale")] = q.scale.to(torch.float16)
                if self.settings.tuning.model.integer_rate:
                    tensors[_key(index, name, "integers")] = q.integers
        for name, parameter in tunable.model.named_parameters():
            if parameter.dim() == 1:
                tensors[name] = parameter.to(tunable.dtypes[name])
        return tensors

    def _rewrite_block(
        self, index: int, learned: Mapping[str, Tensor], writer: ModelWriter
    ) -> None:
        """Replace the two files of a block by new ones, both at once."""
        family, run = self.source.family, self.run
        layout = family.layout(self.source.pretrained.config)
        tensors, shard = load_file(run.block_file(index)), load_file(writer.block_file(index))
        for p in layout.projections:
            for kind in ("scale", "integers"):
                key = _key(index, p.name, kind)
                if key in learned:
                    tensors[f"{p.name}.{kind}"] = learned[key]
        weights = {name: q.weight() for name, q in self._weights(index, tensors).items()}
        prefix = family.block_prefix(index)
        types = stored_types(self.source, index)
        shard |= {name: learned[name] for name in shard if name in learned}
        for path in {p.module: None for p in layout.projections}:
            name = f"{path}.weight"
            shard[prefix + name] = merged(weights, layout, path).to(types[name])
        files = (run.block_file(index), writer.block_file(index))
        metadata = record.metadata(run.blocks[index].losses, run.blocks[index].tuning)
        write_tensors(run.staged(files[0]), tensors, metadata)
        write_tensors(run.staged(files[1]), shard, {"format": "pt"})
        run.replace_block(index, files)


def _key(index: int, projection: str, kind: str) -> str:
    return f"block_{index:03}.{projection}.{kind}"
