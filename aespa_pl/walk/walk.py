"""Walk over the blocks of a model: statistics, grid, update, rounding, files, next block."""

import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from aespa_pl.algorithm.quantizer import StoredWeight, weight_tensors
from aespa_pl.algorithm.workspace import keep_threads
from aespa_pl.block.quantize import BlockQuantizer
from aespa_pl.measure import peak_bytes
from aespa_pl.run.context import Context
from aespa_pl.run.folder import block_curves
from aespa_pl.run.model_writer import ModelWriter
from aespa_pl.run.schema import BlockRecord, TunedModelRecord
from aespa_pl.storage.files import remove_leftovers, write_tensors
from aespa_pl.tuning.tune import Tuned
from aespa_pl.tuning.weights import layers_of, merged
from aespa_pl.walk import couplings, record
from aespa_pl.walk.block_tuner import BlockTuner, replace_weights, restore, stored_types
from aespa_pl.walk.collect import Streams, collect
from aespa_pl.walk.model_tuner import ModelTuner
from aespa_pl.walk.stem import quantize_stem, stem_tensors


class Quantized(NamedTuple):
    """Holds what the steps found of a block."""

    zetas: dict[str, Tensor]  # tensors of the block's file that hold zeta
    weights: Mapping[str, StoredWeight]  # by projection
    losses: dict[str, dict[str, float]]  # what was measured on each projection; only in the first process
    tuned: Tuned | None  # what the tuning of the block found; None: it was not tuned
    descent: list[dict[str, float]]  # points of the losses after passes; only in the first process


class Walk:
    """Quantizes a model block by block into the folder of a run."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.writer = ModelWriter(context.run.model_folder, context.source.block_count)
        self.quantizer = BlockQuantizer(context)
        tuning = context.settings.tuning
        self.block_tuner = BlockTuner(context) if tuning.blocks.enabled else None
        self.model_tuner = ModelTuner(context, self.writer) if tuning.model.enabled else None

    def quantize(self, tokens: Tensor) -> None:
        """Quantize all blocks that are not complete yet, with calibration segments ``[segments, L]``."""
        # hidden states are not stored: a continued run computes them again by replay through
        # the blocks that are complete, which gives the same bits for a fraction of the time
        keep_threads()
        run, world, count = self.context.run, self.context.world, self.context.source.block_count
        run.blocks, run.tuned = world.from_first(partial(self._begin, tokens))
        missing = [index for index in range(count) if index not in run.blocks]
        if missing and self.context.settings.objective.end_loss:
            with self.context.measure("statistics"):
                world.from_first(partial(couplings.prepare, self.context, tokens, missing))
        if self.context.one_block:
            for index in missing[:1]:
                self._walk(tokens, index, index)
            return
        tuner = self.model_tuner if run.tuned is None else None
        if missing or tuner is not None:
            last = missing[-1] if missing else -1
            streams = self._walk(tokens, last, count - 1 if tuner is not None else last)
            if tuner is not None:
                self._tune_model(tuner, tokens, streams)
        if world.is_first:
            if self.model_tuner is not None:
                self.model_tuner.rewrite()
            shutil.rmtree(run.couplings_folder, ignore_errors=True)
            pretrained = self.context.source.pretrained
            self.writer.finish(pretrained.folder, pretrained.own_files)
            run.forget_checkpoint()

    def _begin(self, tokens: Tensor) -> tuple[dict[int, BlockRecord], TunedModelRecord | None]:
        """Write what lies outside the blocks; return what is complete: blocks, end-to-end tuning."""
        run = self.context.run
        for folder in (run.folder, run.block_file(0).parent, run.model_folder, run.couplings_folder):
            remove_leftovers(folder)
        for line in run.reopen(self.context.source.block_count):
            self.context.progress.say(line)
        quantize_stem(self.context, tokens)
        if run.tuned is None:  # otherwise it is rewritten with the blocks
            self.writer.write_stem(stem_tensors(self.context))
        return run.blocks, run.tuned

    def _walk(self, tokens: Tensor, last: int, end: int) -> Streams:
        """Quantize the blocks that are missing; return the hidden states where the streams have ended."""
        # the quantized stream ends before the last missing block, the original one after block ``end``
        context = self.context
        streams = Streams.begin(context, tokens)
        context.progress.begin("Quantizing, blocks", context.source.block_count)
        for index in range(end + 1):
            if index not in context.run.blocks:
                self._quantize_block(index, streams, more=index < last)
            else:
                self._replay(index, streams, quantized=index < last)
            context.free_memory()
            context.progress.advance()
        return streams

    def _replay(self, index: int, streams: Streams, *, quantized: bool) -> None:
        """Run both streams, or the original one only, through a block that is complete."""
        source, measure = self.context.source, self.context.measure
        if quantized:
            complete = source.pretrained.with_block(index, self.writer.block_file(index))
            with source.block(index, complete) as module, measure("forward"):
                source.advance(module, streams.quantized)
        if streams.original:
            with measure("forward"), source.block(index) as module:
                source.advance(module, streams.original)

    def _quantize_block(self, index: int, streams: Streams, *, more: bool) -> None:
        """Quantize a block, and run the hidden states through it where another block is missing."""
        context, run = self.context, self.context.run
        with context.source.block(index) as module:
            seconds_of_block = context.stopwatch.since()
            found = self._quantized(index, module, streams)
            losses, tuning = found.losses, None if found.tuned is None else record.tuning(found.tuned)
            with context.measure("writing"):
                stored = self._store(index, module, found.weights)
                if context.world.is_first:
                    tensors = found.zetas | weight_tensors(found.weights)
                    write_tensors(run.block_file(index), tensors, {})
                    self.writer.write_block(index, context.source.family.as_stored(stored))
            seconds = seconds_of_block()
            known = {"losses": losses, "tuning": tuning, "seconds": seconds}
            files = (run.block_file(index), self.writer.block_file(index))
            run.finish_block(index, known | {"peak_bytes": peak_bytes(context.device)}, files)
            if context.world.is_first:
                run.coupling_file(index).unlink(missing_ok=True)
            self._tell_of_block(index, found, seconds)
            if not more:
                return
            with context.measure("forward"):
                context.source.advance(module, streams.quantized)
        later: dict[str, Any] = {"seconds": seconds_of_block()}
        width = context.source.pretrained.config.hidden_size
        error = record.output_error(streams, width, context.world) if streams.original else math.nan
        if math.isfinite(error):  # JSON has no other numbers
            later["output_error"] = {"rounded" if tuning is None else "tuned": error}
            self._log({"output_error": error}, index)
        run.add_to_block(index, later)
        epochs = None if self.model_tuner is None else context.settings.tuning.model.epochs
        words = record.time_left(run.blocks.values(), context.source.block_count, epochs)
        context.progress.say(words)
        context.progress.left(words)

    def _quantized(self, index: int, module: nn.Module, streams: Streams) -> Quantized:
        """Turn the module into the quantized block, with norms and biases in float32."""
        context, between = self.context, None
        if not context.layout(index).projections:  # all of them are kept
            if streams.original:
                with context.measure("forward"):
                    context.source.advance(module, streams.original)
            restore(module, context.source, index, context.layout(index))
            return Quantized({}, {}, {}, None, [])
        if self.block_tuner is not None:
            with context.measure("tuning"):
                between = self.block_tuner.between(index, module, streams.original)
        with context.measure("statistics"):
            statistics = collect(context, index, module, streams)
            if context.settings.objective.end_loss:
                statistics = replace(statistics, couplings=couplings.read(context, index))
        block = self.quantizer.start(index, module, statistics)
        del statistics  # and with it the memory of the shifts
        self.quantizer.quantize(block)
        losses = record.losses_of(block) if context.world.is_first else {}
        descent = record.descent_curves(block, losses) if losses else []
        zetas = {f"{group}.zeta": zeta for group, zeta in block.zetas().items()}
        if self.block_tuner is None:
            replace_weights(block, module, context.source)
            return Quantized(zetas, block.stored(), losses, None, descent)
        tunable = self.block_tuner.begin(block, module)
        del block  # and with it the memory of the Hessians
        with context.measure("tuning"):
            tuned = self.block_tuner.tune(index, tunable, streams.quantized, between, streams.original)
        return Quantized(zetas, tuned.weights[0], losses, tuned, descent)

    @torch.no_grad()
    def _store(self, index: int, module: nn.Module, weights: Mapping[str, StoredWeight]) -> dict[str, Tensor]:
        """Return a quantized block as it is stored, and give the module the stored values."""
        # so the blocks to come see the hidden states of the model on disk; each value is rounded once, from
        # float32 to its stored type, whatever type blocks run in
        source, layout = self.context.source, self.context.layout(index)
        stored, held, layers = {}, module.state_dict(keep_vars=True), layers_of(layout)
        for name, dtype in stored_types(source, index).items():
            full, path = source.family.block_prefix(index) + name, name.removesuffix(".weight")
            if path in layers:
                parts = {p.name: weights[p.name].weight() for p in layers[path]}
                value = merged(parts, layout, layers[path]).to(dtype)
            else:
                value = held[name].data.to(dtype)
            held[name].data = value.to(source.pretrained.run_type(full, source.dtype))
            if self.context.world.is_first:
                stored[full] = value.cpu()
        return stored

    def _tune_model(self, tuner: ModelTuner, tokens: Tensor, streams: Streams) -> None:
        context, phase = self.context, "tuning the model"
        streams.quantized = []  # whose memory the tuning may need
        seconds = context.stopwatch.since()
        with context.measure(phase):
            tuned, moved = tuner.tune(tokens, streams.original)
        if context.world.is_first:
            context.run.finish_tuning(record.tuning(tuned), {phase: seconds()[phase]}, moved)
        self._log(record.tuning_curves(tuned, "divergence"), context.source.block_count)
        context.progress.say(f"the model, end to end: {record.tuning_words(tuned)}")

    def _tell_of_block(self, index: int, found: Quantized, seconds: Mapping[str, float]) -> None:
        """Say what was found of a block, and add it to the curves over the blocks."""
        if not self.context.world.is_first:
            return
        points, blocks = record.curves(found.losses, seconds), self.context.source.block_count
        said = [record.line(index, blocks, found.losses, sum(seconds.values()))]
        if words := record.few_tokens(index, found.losses):
            said.append(words)
        if found.tuned is not None:
            points |= record.tuning_curves(found.tuned)
            said.append(f"block {index}: {record.tuning_words(found.tuned)}")
        self._log(points, index)
        if found.descent:  # not before: a block that is continued in its tuning would have them twice
            for logger in self.context.trainers.loggers(self.context.run, block_curves(index)):
                for step, losses in enumerate(found.descent):
                    logger.log_metrics(losses, step=step)
                logger.finalize("success")
        for words in said:
            self.context.progress.say(words)

    def _log(self, points: Mapping[str, float], step: int) -> None:
        """Add points to the curves over the blocks; the model comes after its last block."""
        for logger in self.context.loggers:
            logger.log_metrics(dict(points), step=step)
            logger.save()
