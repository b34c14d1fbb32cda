"""The walk over the blocks of a model: statistics, grid, update, rounding, files, next block."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn

from aespa_pl.algorithm.descent import Descent
from aespa_pl.algorithm.quantizer import dequantize, quantize
from aespa_pl.block.preparation import (
    PreparedProjection,
    group_zetas,
)
from aespa_pl.block.search import IntegerSearch, MakeTrainer
from aespa_pl.calibration.collector import StatisticsCollector
from aespa_pl.calibration.statistics import BlockStatisticTensors
from aespa_pl.distributed.processes import ALONE, Ranks
from aespa_pl.errors import UserError
from aespa_pl.measure import Stopwatch, release_memory
from aespa_pl.models.family import Attention, BlockLayout
from aespa_pl.models.headers import DTYPES
from aespa_pl.models.pretrained import Checkpoint
from aespa_pl.models.streamed import StreamedModel, in_turn
from aespa_pl.models.weights import fold, set_projection_weight
from aespa_pl.planning.partition import WHOLE, Partition
from aespa_pl.progress import WalkProgress
from aespa_pl.run.journal import Run
from aespa_pl.run.model_writer import ModelWriter
from aespa_pl.settings import QuantizationSettings
from aespa_pl.storage.batches import Batches
from aespa_pl.storage.files import write_tensors
from aespa_pl.storage.head_matrices import HeadsOnDisk

log = logging.getLogger(__name__)


@dataclass
class Streams:
    """Hidden states of the calibration segments before the block under way, in batches."""

    quantized: Batches
    """As the blocks quantized so far have made them."""
    original: Batches | None
    """As in the original model; None without input_correction."""
    own: bool = True
    """Whether they are this process's; otherwise another has them, and here they only tell the shapes."""


@dataclass(frozen=True)
class Walk:
    """Quantizes a model block by block into the folder of a run."""

    source: StreamedModel
    run: Run
    settings: QuantizationSettings
    batch_size: int
    make_trainer: MakeTrainer
    progress: WalkProgress
    stopwatch: Stopwatch
    partition: Partition = WHOLE
    loggers: Sequence[Logger] = ()
    """Take curves over the blocks; those over the iterations go to the Trainers' own loggers."""
    ranks: Ranks = ALONE
    """All of them walk; each holds the hidden states of its segments, and the first writes."""

    @property
    def layout(self) -> BlockLayout:
        """Projections of each block."""
        return self.source.family.layout(self.source.checkpoint.config)

    @property
    def _search(self) -> IntegerSearch:
        return IntegerSearch(
            self.settings,
            self.layout,
            self.source.device,
            self.run,
            self.make_trainer,
            self.stopwatch,
            self.partition,
            self.ranks,
        )

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
        self._drop_damaged_blocks(writer)
        writer.write_stem({name: checkpoint.tensor(name) for name in checkpoint.stem_names(family)})
        return self.run.blocks

    def _walk(self, tokens: Tensor, missing: Sequence[int], writer: ModelWriter) -> None:
        mine = self.ranks.segments(tokens, self.batch_size)
        own, tokens = len(mine) > 0, mine if len(mine) else tokens[:1]
        streams = Streams(self.source.embed(tokens, self.batch_size), None, own)
        if self.settings.input_correction:
            streams.original = self.source.embed(tokens, self.batch_size)
        self.progress.begin("Quantizing, blocks", self.source.block_count)
        for index in range(missing[-1] + 1):
            complete = index in self.run.blocks
            origin = self._quantized(index, writer) if complete else self.source.checkpoint
            with self.source.block(index, origin) as block:
                if not complete:
                    self._quantize_block(index, block, streams, writer)
                if index < missing[-1]:
                    with self._measure("forward"):
                        self.source.advance(block, streams.quantized)
            if complete and streams.original is not None and index < missing[-1]:
                with self._measure("forward"), self.source.block(index) as block:
                    self.source.advance(block, streams.original)
            release_memory()
            self.progress.advance()

    def _drop_damaged_blocks(self, writer: ModelWriter) -> None:
        """Forget the blocks whose files are not what the journal says; they are done again."""
        for index in sorted(self.run.blocks):
            damaged = self.run.damaged(index, self._files(index, writer))
            if damaged:
                names = ", ".join(str(file) for file in damaged)
                self.progress.say(
                    f"block {index + 1}/{self.source.block_count}: {names} is damaged or missing: the "
                    "block is quantized again"
                )
                del self.run.blocks[index]
        if self.run.blocks:
            self.progress.say(
                f"{len(self.run.blocks)} of {self.source.block_count} blocks are complete already"
            )

    def _files(self, index: int, writer: ModelWriter) -> tuple[Path, Path]:
        return self.run.block_file(index), writer.block_file(index)

    def _quantized(self, index: int, writer: ModelWriter) -> Checkpoint:
        """Return the model's checkpoint, with a block's tensors where their quantized values lie."""
        checkpoint = self.source.checkpoint
        moved = {
            name: replace(checkpoint.tensors[name], file=writer.block_file(index), name=name)
            for name in checkpoint.block_names(self.source.family, index)
        }
        return replace(checkpoint, tensors={**checkpoint.tensors, **moved})

    def _quantize_block(
        self, index: int, block: nn.Module, streams: Streams, writer: ModelWriter
    ) -> None:
        before = dict(self.stopwatch.seconds)
        with self._measure("statistics"):
            statistics = self._collect(index, block, streams)
        targets = self._search.targets(index, block, statistics)
        statistics = statistics.without_shifts()  # which frees their memory
        prepared, integers, descents = self._search.run(index, block, statistics, targets)
        with self._measure("writing"):
            record = {}
            if self.ranks.is_first:
                record = self._record(index, prepared, integers, descents)
                # one key: safetensors writes several in any order
                metadata = {"block": json.dumps(record)}
                artifact = _artifact(self.layout, prepared, integers)
                write_tensors(self.run.block_file(index), artifact, metadata)
            stored = self._replace_weights(index, block, prepared, integers)
            if self.ranks.is_first:
                writer.write_block(index, stored)
        seconds = {k: v - before.get(k, 0.0) for k, v in self.stopwatch.seconds.items()}
        self.run.finish_block(index, {**record, "seconds": seconds}, self._files(index, writer))
        if not self.ranks.is_first:
            return
        for logger in self.loggers:
            logger.log_metrics(_curves(record, seconds), step=index)
            logger.save()
        self._say(index, record, sum(seconds.values()))

    def _collect(self, index: int, block: nn.Module, streams: Streams) -> BlockStatisticTensors:
        """Run step 1; the original model's hidden states, if there are any, go on to the next block.

        Where the partition wants it, H_V is collected for some heads at a time, and waits on disk.
        """
        heads = self.layout.key_value_heads
        groups = [range(heads)]
        if self.settings.objective.value == "attention":
            groups = self.partition.head_groups(heads)
        statistics = self._run_through(index, block, streams, groups[0], last=len(groups) == 1)
        if len(groups) > 1:
            statistics = replace(
                statistics,
                attended=self._on_disk(statistics.attended),
                attended_shift=self._on_disk(statistics.attended_shift),
            )
        for group in groups[1:]:
            more = self._run_through(index, block, streams, group, last=group is groups[-1])
            for stored, found in (
                (statistics.attended, more.attended),
                (statistics.attended_shift, more.attended_shift),
            ):
                if isinstance(stored, HeadsOnDisk) and isinstance(found, Tensor):
                    stored.append(found)
        return statistics

    def _on_disk(self, matrices: Tensor | HeadsOnDisk | None) -> HeadsOnDisk | None:
        """Return the matrices of the first heads in a file, to which others can be appended."""
        if not isinstance(matrices, Tensor):
            return matrices
        stored = HeadsOnDisk.create(self.run.folder, self.source.device)
        stored.append(matrices)
        return stored

    def _run_through(
        self,
        index: int,
        block: nn.Module,
        streams: Streams,
        heads: range,
        *,
        last: bool,
    ) -> BlockStatisticTensors:
        """Run all segments through a block and collect H_V of some heads; the first time, everything else."""
        objective, first = self.settings.objective, heads.start == 0
        collector = StatisticsCollector(
            self.layout,
            value=objective.value == "attention",
            query_key=first and objective.query_key == "attention",
            inputs=first,
            heads=heads,
            precision="float32" if self.settings.products == "float32" else "tf32",
        )
        observe = partial(self._observe_attention, block)
        original = in_turn(streams.original or [], self.source.device)
        for i, quantized in enumerate(in_turn(streams.quantized, self.source.device)):
            if streams.original is not None:
                with collector.watch_original(block, observe):
                    after = self.source.run_block(block, next(original)).cpu()
                if last:
                    streams.original[i] = after
            with collector.watch(block, observe):
                self.source.run_block(block, quantized)
        if not self.ranks.alone:
            collector.add_up(self.ranks.sum_, counts=streams.own)
        statistics = collector.finish(self.source.family.norm_weights(block))
        for name, tensor in _named_statistics(statistics):
            if not bool(torch.isfinite(tensor).all()):
                dtype = str(self.source.dtype).removeprefix("torch.")
                advice = (
                    "check model.pretrained" if dtype == "float32" else "try model.dtype float32"
                )
                raise UserError(
                    f"block {index}: the statistic {name} has NaN or infinite values, so the model's "
                    f"activations overflow in {dtype}: {advice}"
                )
        return statistics

    def _observe_attention(
        self, block: nn.Module, see: Callable[[Attention], None]
    ) -> AbstractContextManager[None]:
        return self.source.family.observe_attention(self.source.model, block, see)

    def _record(
        self,
        index: int,
        prepared: Mapping[str, PreparedProjection],
        integers: Mapping[str, Tensor],
        descents: Mapping[str, Descent],
    ) -> dict[str, Any]:
        """Return what was measured on a block."""
        losses: dict[str, dict[str, float]] = {}
        for name, p in prepared.items():
            if p.extra_damping:
                log.warning(
                    "block %d, %s: the Hessian needed %g of its mean diagonal as extra damping",
                    index, name, p.extra_damping,
                )  # fmt: skip
            losses[name] = {
                "nearest": float(p.loss(quantize(p.weight, p.grid)).sum()),
                "optq": float(p.loss(p.integers).sum()),
                "final": float(p.loss(integers[name]).sum()),
                "extra_damping": p.extra_damping,
            }
        for name, descent in descents.items():
            losses[name] |= {
                "before_polish": descent.loss_before,
                "polish_passes": descent.passes,
                "polish_changed": descent.changed,
            }
        return {"losses": losses}

    def _replace_weights(
        self,
        index: int,
        block: nn.Module,
        prepared: Mapping[str, PreparedProjection],
        integers: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Turn the block into the quantized one; return its tensors as they are stored.

        The block gets the stored values back: the hidden states of the blocks to come are those of
        the model on disk.
        """
        checkpoint = self.source.checkpoint
        with torch.no_grad():
            fold(block, self.layout, group_zetas(self.layout, prepared))
            for p in prepared.values():
                folded = replace(p.grid, scale=p.export_scale, zeta=torch.ones_like(p.grid.zeta))
                weight = dequantize(integers[p.projection.name], folded).flatten(0, 1)
                set_projection_weight(block, self.layout, p.projection, weight)
            stored = {}
            for name in checkpoint.block_names(self.source.family, index):
                tensor = block.get_parameter(name.removeprefix(self._prefix(index)))
                stored[name] = tensor.to(DTYPES[checkpoint.tensors[name].dtype])
                tensor.copy_(stored[name])
        return stored

    def _prefix(self, index: int) -> str:
        return f"{self.source.family.blocks_path}.{index}."

    def _finish(self, writer: ModelWriter) -> None:
        checkpoint, family = self.source.checkpoint, self.source.family
        names = {0: checkpoint.stem_names(family)}
        for index in range(self.source.block_count):
            names[index + 1] = checkpoint.block_names(family, index)
        writer.finish(names, checkpoint.config, checkpoint.tokenizer(), checkpoint.folder)
        self.run.forget_checkpoint()

    def _say(self, index: int, record: Mapping[str, Any], seconds: float) -> None:
        losses = record["losses"].values()
        line = f"block {index + 1}/{self.source.block_count}: "
        if self.settings.polish.enabled:
            changed = sum(x["polish_changed"] for x in losses)
            passes = max(x["polish_passes"] for x in losses)
            line += f"polish changed {changed} integers in {passes} passes; "
        shares = [x["final"] / x["nearest"] for x in losses if x["nearest"] > 0]
        mean = sum(shares) / max(1, len(shares))
        self.progress.say(f"{line}loss {mean:.3f} of nearest rounding's, {seconds:.1f} s")

    def _measure(self, phase: str) -> Any:
        return self.stopwatch.measure(phase, self.source.device)


def _curves(record: Mapping[str, Any], seconds: Mapping[str, float]) -> dict[str, float]:
    """Return what was measured on a block as the points of curves over the blocks."""
    curves = {f"seconds/{phase}": value for phase, value in seconds.items()}
    for name, losses in record["losses"].items():
        if losses["nearest"] > 0:
            curves[f"loss_of_nearest/{name}"] = losses["final"] / losses["nearest"]
        if losses.get("before_polish", 0) > 0:
            curves[f"polish_loss_of_before/{name}"] = losses["final"] / losses["before_polish"]
            curves[f"polish_changed/{name}"] = losses["polish_changed"]
            curves[f"polish_passes/{name}"] = losses["polish_passes"]
    return curves


def _named_statistics(statistics: BlockStatisticTensors) -> list[tuple[str, Tensor]]:
    named = [(f"H of {name}", tensor) for name, tensor in statistics.inputs.items()]
    others = {
        "H_V": statistics.attended,
        "G_Q": statistics.keys,
        "G_K": statistics.queries,
        "the shift of H_V": statistics.attended_shift,
    }
    named += [(f"the shift of {name}", tensor) for name, tensor in statistics.shifts.items()]
    named += [
        (f"the residual shift of {name}", tensor)
        for name, tensor in statistics.residual_shifts.items()
    ]
    return named + [(name, x) for name, x in others.items() if isinstance(x, Tensor)]


def _artifact(
    layout: BlockLayout,
    prepared: Mapping[str, PreparedProjection],
    integers: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return the tensors of a block's file.

    The weights are ``scale * (integers - zero_point)``: zeta is folded into them already.
    """
    tensors = {f"{group}.zeta": zeta for group, zeta in group_zetas(layout, prepared).items()}
    for name, p in prepared.items():
        tensors[f"{name}.integers"] = integers[name].flatten(0, 1).to(torch.uint8)
        tensors[f"{name}.scale"] = p.export_scale.flatten(0, 1).to(torch.float16)
        tensors[f"{name}.zero_point"] = p.grid.zero_point.flatten(0, 1).to(torch.uint8)
    return tensors
