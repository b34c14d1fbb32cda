"""Hold what every step of a run works with: model, folder, settings, processes, Trainers."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger

from aespa_pl.distributed.processes import ALONE, World
from aespa_pl.measure import Stopwatch, release_memory
from aespa_pl.models.family import BlockLayout
from aespa_pl.models.kept import layout_of
from aespa_pl.models.streamed import StreamedModel
from aespa_pl.planning.partition import WHOLE, Partition
from aespa_pl.progress import WalkProgress
from aespa_pl.run.folder import Training
from aespa_pl.run.journal import Run
from aespa_pl.run.model_writer import ModelWriter
from aespa_pl.settings import QuantizationSettings


class Trainers(Protocol):
    """Makes Lightning's Trainers and loggers for the trainings of a run."""

    def begin(self, run: Run) -> Sequence[Logger]:
        """Return the loggers of the curves over the blocks; the first process calls it at the start."""

    def loggers(self, run: Run, curves: str) -> Sequence[Logger]:
        """Return new loggers of a run's curves, by the name of their folder."""

    def free(self) -> None:
        """Free Trainers, modules and optimizers, which refer to each other; an interruption waits."""

    def of_rounding(self, run: Run, training: Training) -> Trainer:
        """Return the Trainer that learns the rounding of a portion of a block."""

    def of_tuning(self, run: Run, training: Training, epochs: int) -> Trainer:
        """Return the Trainer of the tuning of a block or of the model, with ``num_sanity_val_steps=-1``."""


@dataclass(frozen=True)
class Context:
    """Holds the same objects for all steps of a run; ``aespa_pl.commands.fit`` makes it."""

    source: StreamedModel  # the original
    run: Run
    settings: QuantizationSettings
    trainers: Trainers
    batch_size: int  # calibration segments that run through a block at once
    progress: WalkProgress
    stopwatch: Stopwatch
    partition: Partition = WHOLE  # how much of a block is in memory at once
    recompute: bool = False  # blocks run again in the end-to-end tuning's backward pass: takes less memory
    loggers: Sequence[Logger] = ()  # of the curves over the blocks; each Trainer has others
    one_block: bool = False  # ends after one block more: a smoke test
    world: World = ALONE  # which make the same calls; each has its segments' hidden states, the first writes

    @property
    def device(self) -> torch.device:
        """Return the device that blocks run on."""
        return self.source.device

    @property
    def division(self) -> str:
        """Return how several processes divide the segments, for the name of a training; or nothing."""
        return f", {self.world.size} processes, batches of {self.batch_size}" if self.world.size > 1 else ""

    def layout(self, block: int) -> BlockLayout:
        """Return the layout of a block, given its number."""
        return layout_of(self.source.family, self.source.pretrained.config, self.settings, block)

    @property
    def quantized_stem(self) -> StreamedModel:
        """Return the model with the run's own embedding and head, once they are written."""
        if all("." in key for key in self.settings.types):
            return self.source
        pretrained = self.source.pretrained
        file = ModelWriter(self.run.model_folder, self.source.block_count).stem_file
        return replace(self.source, pretrained=pretrained.with_stem(file))

    def types(self, block: int) -> dict[str, str | None]:
        """Return the block types of a block's projections; None where the grid is uniform."""
        return {p.name: self.settings.type_for(block, p.name) for p in self.layout(block).projections}

    def free_memory(self) -> None:
        """Free what refers to each other, and give its memory back to the system."""
        self.trainers.free()
        release_memory()

    def measure(self, phase: str) -> AbstractContextManager[None]:
        """Add the time that is spent in the returned context to a phase, which begins with free memory."""
        release_memory()
        return self.stopwatch.measure(phase, self.device)
