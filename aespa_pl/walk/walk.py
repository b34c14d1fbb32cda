"""The walk over the blocks of a model: statistics, grid, update, rounding, files, next block."""

import json
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn

from aespa_pl.algorithm.quantizer import dequantize
from aespa_pl.block.quantize import BlockQuantizer
from aespa_pl.block.quantized import QuantizedBlock
from aespa_pl.calibration.statistics import BlockStatistics
from aespa_pl.distributed.processes import ALONE, Ranks
from aespa_pl.measure import Stopwatch, peak_bytes, release_memory
from aespa_pl.models.family import BlockLayout
from aespa_pl.models.headers import DTYPES
from aespa_pl.models.pretrained import Checkpoint
from aespa_pl.models.streamed import StreamedModel
from aespa_pl.models.weights import fold, set_projection_weight
from aespa_pl.progress import WalkProgress
from aespa_pl.run.journal import Run
from aespa_pl.run.model_writer import ModelWriter
from aespa_pl.settings import QuantizationSettings
from aespa_pl.storage.files import write_tensors
from aespa_pl.walk import record
from aespa_pl.walk.collect import StatisticsPasses, Streams

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
    loggers: Sequence[Logger] = ()
    """Take curves over the blocks; those over the iterations go to the Trainers' own loggers."""
    ranks: Ranks = ALONE
    """All of them walk; each holds the hidden states of its segments, and the first writes."""

    @property
    def layout(self) -> BlockLayout:
        """Projections of each block."""
        return self.source.family.layout(self.source.checkpoint.config)

    def quantize(self, tokens: Tensor) -> None:
        """Quantize all blocks that are not complete yet, and finish the model folder.

        Hidden states are not stored: those of a continued run are computed anew by replay through
        the blocks that are complete, which gives the same bits for a fraction of the time.

        Args:
            tokens: Calibration segments, ``[segments, L]``.
        """
        writer = ModelWriter(self.run.model_folder, self.source.block_count)
        self.run.blocks = self.ranks.from_first(lambda: self._begin(writer))
        missing = [i for i in range(self.source.block_count) if i not in self.run.blocks]
        if missing:
            self._walk(tokens, missing, writer)
        if self.ranks.is_first:
            self._finish(writer)

    def _begin(self, writer: ModelWriter) -> dict[int, dict[str, Any]]:
        """Write what lies outside the blocks; return what is known of those that are complete."""
        checkpoint, family = self.source.checkpoint, self.source.family
        self._drop_damaged_blocks()
        writer.write_stem({name: checkpoint.tensor(name) for name in checkpoint.stem_names(family)})
        return self.run.blocks

    def _walk(self, tokens: Tensor, missing: Sequence[int], writer: ModelWriter) -> None:
        two = self.settings.input_correction > 0
        streams = Streams.begin(self.source, tokens, self.batch_size, self.ranks, two=two)
        self.progress.begin("Quantizing, blocks", self.source.block_count)
        for index in range(missing[-1] + 1):
            complete = index in self.run.blocks
            origin = self._quantized(index, writer) if complete else self.source.checkpoint
            with self.source.block(index, origin) as module:
                if not complete:
                    self._quantize_block(index, module, streams, writer)
                # after the last block only for the error of its output
                if index < missing[-1] or two:
                    with self._measure("forward"):
                        self.source.advance(module, streams.quantized)
            if complete and streams.original is not None and index < missing[-1]:
                with self._measure("forward"), self.source.block(index) as module:
                    self.source.advance(module, streams.original)
            if two and not complete:
                error = record.output_error(streams, self.ranks)
                if math.isfinite(error):  # JSON has no other numbers
                    self.run.add_to_block(index, {"output_error": {"rounded": error}})
            release_memory()
            self.progress.advance()

    def _drop_damaged_blocks(self) -> None:
        """Forget the blocks whose files are not what the journal says; they are done again."""
        for index in sorted(self.run.blocks):
            damaged = self.run.damaged_files(index)
            if damaged:
                names = ", ".join(str(file) for file in damaged)
                self.progress.say(
                    f"block {index} of {self.source.block_count}: {names} is damaged or missing: the "
                    "block is quantized again"
                )
                del self.run.blocks[index]
        if self.run.blocks:
            self.progress.say(
                f"{len(self.run.blocks)} of {self.source.block_count} blocks are complete already"
            )

    def _quantized(self, index: int, writer: ModelWriter) -> Checkpoint:
        """Return the model's checkpoint, with a block's tensors where their quantized values lie."""
        checkpoint = self.source.checkpoint
        moved = {
            name: replace(checkpoint.tensors[name], file=writer.block_file(index), name=name)
            for name in checkpoint.block_names(self.source.family, index)
        }
        return replace(checkpoint, tensors={**checkpoint.tensors, **moved})

    def _quantize_block(
        self, index: int, module: nn.Module, streams: Streams, writer: ModelWriter
    ) -> None:
        before = dict(self.stopwatch.seconds)
        with self._measure("statistics"):
            statistics = self.passes.collect(index, module, streams)
        if index == 1:  # the first block whose inputs differ from the original model's
            self._warn_of_few_tokens(statistics)
        block = self.quantizer.start(index, module, self.layout, statistics)
        del statistics  # and with it the memory of the shifts
        self.quantizer.quantize(block)
        with self._measure("writing"):
            measured = self._store(block, module, writer)
        seconds = {k: v - before.get(k, 0.0) for k, v in self.stopwatch.seconds.items()}
        files = (self.run.block_file(index), writer.block_file(index))
        known = {
            "losses": measured,
            "seconds": seconds,
            "peak_bytes": peak_bytes(self.source.device),
        }
        self.run.finish_block(index, known, files)
        if not self.ranks.is_first:
            return
        for logger in self.loggers:
            logger.log_metrics(record.curves(measured, seconds), step=index)
            logger.save()
        total = sum(seconds.values())
        self.progress.say(record.line(index, self.source.block_count, measured, total))

    def _warn_of_few_tokens(self, statistics: BlockStatistics) -> None:
        """Say that the correction has little to go by."""
        if statistics.shifts is None:
            return
        widest = max(len(shift) for shift in statistics.shifts.inputs.values())
        if statistics.tokens < TOKENS_PER_INPUT * widest:
            self.progress.say(
                f"{statistics.tokens} calibration tokens are few for projections with up to {widest} "
                f"inputs: quantization.input_correction {self.settings.input_correction:g} is a "
                f"regression that wants {TOKENS_PER_INPUT} tokens an input or more. It is applied all the "
                "same; raise data.calibration.segments, or set it to 0"
            )

    def _store(
        self, block: QuantizedBlock, module: nn.Module, writer: ModelWriter
    ) -> dict[str, dict[str, float]]:
        """Write the block and turn the module into it; return what was measured on it."""
        measured = {}
        if self.ranks.is_first:
            measured = record.losses(block)
            # one key: safetensors writes several in any order
            metadata = {"block": json.dumps({"losses": measured})}
            write_tensors(self.run.block_file(block.index), record.artifact(block), metadata)
        stored = self._replace_weights(block, module)
        if self.ranks.is_first:
            writer.write_block(block.index, stored)
        return measured

    @torch.no_grad()
    def _replace_weights(self, block: QuantizedBlock, module: nn.Module) -> dict[str, Tensor]:
        """Turn the module into the quantized block; return its tensors as they are stored.

        The module gets the stored values back: the hidden states of the blocks to come are those of
        the model on disk.
        """
        checkpoint, family = self.source.checkpoint, self.source.family
        fold(module, self.layout, block.zetas())
        for p in block.projections.values():
            weight = dequantize(p.integers, p.folded_grid).flatten(0, 1)
            set_projection_weight(module, self.layout, p.projection, weight)
        stored = {}
        for name in checkpoint.block_names(family, block.index):
            tensor = module.get_parameter(name.removeprefix(f"{family.blocks_path}.{block.index}."))
            stored[name] = tensor.to(DTYPES[checkpoint.tensors[name].dtype])
            tensor.copy_(stored[name])
        return stored

    def _finish(self, writer: ModelWriter) -> None:
        checkpoint, family = self.source.checkpoint, self.source.family
        names = {0: checkpoint.stem_names(family)}
        for index in range(self.source.block_count):
            names[index + 1] = checkpoint.block_names(family, index)
        writer.finish(names, checkpoint.folder)
        self.run.forget_checkpoint()

    def _measure(self, phase: str) -> AbstractContextManager[None]:
        return self.stopwatch.measure(phase, self.source.device)
