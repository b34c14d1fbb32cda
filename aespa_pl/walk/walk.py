"""Walk over the blocks of a model: statistics, grid, update, rounding, files, next block."""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import cast

import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn

from aespa_pl.algorithm.threads import keep_threads
from aespa_pl.block.quantize import BlockQuantizer
from aespa_pl.calibration.statistics import BlockStatistics
from aespa_pl.distributed.processes import ALONE, World
from aespa_pl.measure import Stopwatch, peak_bytes, release_memory
from aespa_pl.models.family import BlockLayout
from aespa_pl.models.streamed import StreamedModel
from aespa_pl.progress import WalkProgress
from aespa_pl.run.journal import Run
from aespa_pl.run.model_writer import ModelWriter
from aespa_pl.run.schema import BlockRecord, TunedModelRecord
from aespa_pl.settings import QuantizationSettings
from aespa_pl.storage.batches import Batches
from aespa_pl.storage.files import remove_leftovers, write_tensors
from aespa_pl.tuning import TunedModel
from aespa_pl.walk import record
from aespa_pl.walk.collect import StatisticsPasses, Streams
from aespa_pl.walk.end_to_end import ModelTuner
from aespa_pl.walk.tuning import BlockTuner, replace_weights, stored_types

TOKENS_PER_INPUT = 4
"""Calibration tokens for each input of a projection below which the correction is called unsure."""


@dataclass(frozen=True)
class Walk:
    """Quantizes a model block by block into the folder of a run."""

    source: StreamedModel
    run: Run
    settings: QuantizationSettings
    batch_size: int
    quantizer: BlockQuantizer
    passes: StatisticsPasses
    progress: WalkProgress
    stopwatch: Stopwatch
    block_tuner: BlockTuner | None = None
    """Tunes each block as a whole; None: blocks are not tuned."""
    model_tuner: ModelTuner | None = None
    """Tunes the model end to end; None: it is not tuned."""
    loggers: Sequence[Logger] = ()
    """Loggers of the curves over the blocks; the Trainers have loggers of their own for the iterations."""
    world: World = ALONE
    """Processes of the run, which all walk; each has the hidden states of its segments, the first writes."""

    @property
    def layout(self) -> BlockLayout:
        """Return the layout of each block."""
        return self.source.family.layout(self.source.pretrained.config)

    def quantize(self, tokens: Tensor) -> None:
        """Quantize all blocks that are not complete yet, and finish the model folder.

        Hidden states are not stored: a continued run computes them again by replay through
        the blocks that are complete, which gives the same bits for a fraction of the time.

        Args:
            tokens: Calibration segments, ``[segments, L]``.
        """
        keep_threads()
        writer = ModelWriter(self.run.model_folder, self.source.block_count)
        self.run.blocks, self.run.tuned = self.world.from_first(lambda: self._begin(writer))
        if self._missing or self._tunes_model:
            streams = self._walk(tokens, self._missing, writer)
            if self.model_tuner is not None and self._tunes_model:
                with self._measure("tuning the model"):
                    tuned = self.model_tuner.tune(
                        tokens, cast(Batches, streams.original), self.batch_size, writer
                    )
                seconds = self.stopwatch.seconds["tuning the model"]
                self.run.note_tuning_seconds({"tuning the model": seconds})
                self._tell_of_tuning(tuned)
        if self.world.is_first:
            if self.model_tuner is not None:
                self.model_tuner.rewrite(writer)
            self._finish(writer)

    @property
    def _missing(self) -> list[int]:
        return [i for i in range(self.source.block_count) if i not in self.run.blocks]

    @property
    def _tunes_model(self) -> bool:
        return self.model_tuner is not None and self.run.tuned is None

    def _begin(self, writer: ModelWriter) -> tuple[dict[int, BlockRecord], TunedModelRecord | None]:
        """Write what lies outside the blocks; return what is complete: blocks, end-to-end tuning."""
        pretrained, family = self.source.pretrained, self.source.family
        self.run.finish_replacing()
        for folder in (self.run.block_file(0).parent, self.run.model_folder):
            remove_leftovers(folder)
        self.run.model = {}  # of a finished run that is mended: the next write of the journal says so
        self._drop_damaged_blocks()
        stem = {name: pretrained.tensor(name) for name in pretrained.stem_names(family)}
        if self.run.tuned is None:  # otherwise it is rewritten with the blocks
            writer.write_stem(stem)
        return self.run.blocks, self.run.tuned

    def _walk(self, tokens: Tensor, missing: Sequence[int], writer: ModelWriter) -> Streams:
        """Quantize the blocks that are missing; return the hidden states after the last block.

        The quantized stream ends before the last block that is missing. The original one goes on to the
        end where the model is tuned.
        """
        two = self.settings.two_streams
        streams = Streams.begin(self.source, tokens, self.batch_size, self.world, two=two)
        self.progress.begin("Quantizing, blocks", self.source.block_count)
        last = missing[-1] if missing else -1
        end = self.source.block_count - 1 if self._tunes_model else last
        for index in range(end + 1):
            complete, forward = index in self.run.blocks, self.stopwatch.seconds["forward"]
            if not complete or index < last:
                origin, files = self.source.pretrained, {index: writer.block_file(index)}
                if complete:
                    origin = origin.with_blocks(self.source.family, files)
                with self.source.block(index, origin) as module:
                    if not complete:
                        self._quantize_block(index, module, streams, writer)
                    if index < last:
                        with self._measure("forward"):
                            self.source.advance(module, streams.quantized)
                    if index < last and not complete:
                        passed = self.stopwatch.seconds["forward"] - forward
                        seconds = self.run.blocks[index].seconds | {"forward": passed}
                        self.run.add_to_block(index, {"seconds": seconds})
            if complete and streams.original is not None and (index < last or self._tunes_model):
                with self._measure("forward"), self.source.block(index) as module:
                    self.source.advance(module, streams.original)
            if streams.original is not None and not complete and index < last:
                error = record.output_error(streams, self.world)
                stage = "tuned" if self.run.blocks[index].tuning else "rounded"
                if math.isfinite(error):  # JSON has no other numbers
                    self.run.add_to_block(index, {"output_error": {stage: error}})
            release_memory()
            self.progress.advance()
        return streams

    def _drop_damaged_blocks(self) -> None:
        """Forget the blocks whose files are not what the journal says; they are done again."""
        run, count = self.run, self.source.block_count
        damaged = {i: files for i in sorted(run.blocks) if (files := run.damaged_files(i))}
        for index, files in damaged.items():
            names = ", ".join(str(file) for file in files)
            self.progress.say(
                f"block {index} of {count}: {names} is damaged or missing: the block is quantized again"
            )
            del run.blocks[index]
        if run.tuned is not None and (damaged or not run.tuning_is_intact()):
            # the blocks that it has changed are no longer what a block was quantized after
            self.progress.say(
                "the end-to-end tuning cannot be gone on with, because a file is damaged or missing: all "
                "blocks are quantized again"
            )
            run.blocks.clear()
            run.tuned = None
        if run.blocks:
            self.progress.say(f"{len(run.blocks)} of {count} blocks are complete already")

    def _quantize_block(
        self, index: int, module: nn.Module, streams: Streams, writer: ModelWriter
    ) -> None:
        before = dict(self.stopwatch.seconds)
        between = None
        if self.block_tuner is not None:
            with self._measure("tuning"):
                between = self.block_tuner.between(module, cast(Batches, streams.original))
        with self._measure("statistics"):
            statistics = self.passes.collect(index, module, streams)
        if index == 1:  # the first block whose inputs differ from the original model's
            self._warn_of_few_tokens(statistics)
        block = self.quantizer.start(index, module, self.layout, statistics)
        del statistics  # and with it the memory of the shifts
        self.quantizer.quantize(block)
        measured = record.losses(block) if self.world.is_first else {}
        tensors = record.artifact(block) if self.world.is_first else {}
        tuned = None
        if self.block_tuner is None:
            replace_weights(block, module)
        else:
            tunable = self.block_tuner.begin(block, module)
            del block  # and with it the memory of the Hessians
            with self._measure("tuning"):
                tuned = self.block_tuner.tune(
                    index, tunable, streams.quantized, between, cast(Batches, streams.original)
                )
            tensors |= record.weight_tensors(tuned.weights)
        tuning = None if tuned is None else record.tuning(tuned)
        with self._measure("writing"):
            self._store(index, module, tensors, record.metadata(measured, tuning), writer)
        seconds = {k: v - before.get(k, 0.0) for k, v in self.stopwatch.seconds.items()}
        files = (self.run.block_file(index), writer.block_file(index))
        peak = peak_bytes(self.source.device)
        known = {"losses": measured, "tuning": tuning, "seconds": seconds, "peak_bytes": peak}
        self.run.finish_block(index, known, files)
        if not self.world.is_first:
            return
        for logger in self.loggers:
            logger.log_metrics(
                record.curves(measured, seconds) | record.tuning_curves(tuned), step=index
            )
            logger.save()
        total = sum(seconds.values())
        self.progress.say(record.line(index, self.source.block_count, measured, total))
        if tuned is not None:
            self.progress.say(f"block {index}: {record.tuning_words(tuned)}")

    def _warn_of_few_tokens(self, statistics: BlockStatistics) -> None:
        """Say so where the correction has few tokens to learn from."""
        if statistics.shifts is None:
            return
        widest = max(len(hessian.dead[0]) for hessian in statistics.inputs.values())
        if statistics.tokens < TOKENS_PER_INPUT * widest:
            self.progress.say(
                f"{statistics.tokens} calibration tokens are few for projections with up to {widest} "
                f"inputs: quantization.input_correction {self.settings.input_correction:g} is a "
                f"regression that wants {TOKENS_PER_INPUT} tokens an input or more. It is applied all the "
                "same; raise data.calibration.segments, or set it to 0"
            )

    @torch.no_grad()
    def _store(
        self,
        index: int,
        module: nn.Module,
        tensors: Mapping[str, Tensor],
        metadata: Mapping[str, str],
        writer: ModelWriter,
    ) -> None:
        """Write a block that is quantized, and give the module the stored values back.

        So the blocks to come see the hidden states of the model on disk.
        """
        module.to(self.source.dtype)  # after a tuning it is float32
        prefix = self.source.family.block_prefix(index)
        stored = {}
        for name, dtype in stored_types(self.source, index).items():
            tensor = module.get_parameter(name)
            stored[prefix + name] = tensor.to(dtype)
            tensor.copy_(stored[prefix + name])
        if self.world.is_first:
            write_tensors(self.run.block_file(index), tensors, metadata)
            writer.write_block(index, stored)

    def _finish(self, writer: ModelWriter) -> None:
        pretrained, family = self.source.pretrained, self.source.family
        names = {0: pretrained.stem_names(family)}
        for index in range(self.source.block_count):
            names[index + 1] = pretrained.block_names(family, index)
        writer.finish(names, pretrained.folder)
        self.run.forget_checkpoint()

    def _tell_of_tuning(self, tuned: TunedModel) -> None:
        """Say what the end-to-end tuning found, and show it beside the curves over the blocks."""
        for logger in self.loggers:
            logger.log_metrics(record.tuning_curves(tuned), step=self.source.block_count)
            logger.save()
        self.progress.say(f"the model, end to end: {record.tuning_words(tuned)}")

    def _measure(self, phase: str) -> AbstractContextManager[None]:
        return self.stopwatch.measure(phase, self.source.device)
