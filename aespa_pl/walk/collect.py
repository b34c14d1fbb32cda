"""Run the calibration segments through a block, and collect its statistics (step 1)."""

from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from aespa_pl.calibration.collector import StatisticsCollector
from aespa_pl.calibration.experts import ExpertSums
from aespa_pl.calibration.hessian import Hessian
from aespa_pl.calibration.observe import observing
from aespa_pl.calibration.statistics import BlockStatistics
from aespa_pl.errors import UserError
from aespa_pl.run.context import Context
from aespa_pl.storage.batches import Batches, MatricesOnDisk
from aespa_pl.storage.transfer import in_turn, sending_back


@dataclass
class Streams:
    """Holds the hidden states of the calibration segments before the block under way, in batches."""

    quantized: Batches
    """Hidden states that the blocks quantized so far have made."""
    original: Batches
    """Hidden states in the original model; empty where neither input_correction nor tuning needs them."""
    own: bool
    """Whether they are this process's; otherwise another has them, and here they only tell the shapes."""

    @classmethod
    def begin(cls, context: Context, tokens: Tensor) -> "Streams":
        """Embed this process's part of the calibration segments ``[segments, L]``."""
        mine = context.world.segments(tokens, context.batch_size)
        own = len(mine) > 0
        mine = mine if own else tokens[:1]
        quantized = context.quantized_stem.embed(mine, context.batch_size)
        if not context.settings.two_streams:
            return cls(quantized, [], own)
        if context.quantized_stem is not context.source:
            return cls(quantized, context.source.embed(mine, context.batch_size), own)
        again = (quantized[i] for i in range(len(quantized)))
        return cls(quantized, context.source.keep(again), own)


@dataclass(frozen=True)
class StatisticsPasses:
    """Runs the calibration segments through one block after the other."""

    context: Context

    def collect(self, index: int, module: nn.Module, streams: Streams) -> BlockStatistics:
        """Return the statistics of a block; the original model's hidden states go on to the next one.

        ``module`` has its original weights. Where the partition wants it, H_V is collected for some heads at
        a time, and waits on disk. Raises UserError where a statistic is not finite: activations overflow.
        """
        context, layout = self.context, self.context.layout(index)
        first, *others = [range(layout.key_value_heads)]
        if layout.attended_group is not None and context.settings.objective.value == "attention":
            first, *others = context.partition.head_groups(layout.key_value_heads)
        statistics = self._run_through(index, module, streams, first, last=not others)
        if not others:
            return statistics
        values = MatricesOnDisk(context.run.folder, context.device)
        shifts = _move_values(statistics, values)
        statistics = replace(statistics, attended=None)  # and with it the memory of H_V
        for group in others:
            more = self._run_through(index, module, streams, group, last=group is others[-1])
            shifts += _move_values(more, values)
        found = statistics.shifts
        if found is not None:
            found = replace(found, attended=torch.cat(shifts))
        return replace(statistics, attended=Hessian(values), shifts=found)

    def _run_through(
        self, index: int, module: nn.Module, streams: Streams, heads: range, *, last: bool
    ) -> BlockStatistics:
        """Run all segments through a block and collect H_V of some heads; the first time, everything else."""
        source, settings, device = self.context.source, self.context.settings, self.context.device
        objective, first = settings.objective, heads.start == 0
        layout = self.context.layout(index)
        attends = layout.attended_group is not None
        mixture = layout.mixture if first else None
        collector = StatisticsCollector(
            layout,
            value=attends and objective.value == "attention",
            query_key=attends and first and objective.query_key == "attention",
            inputs=first,
            magnitudes=bool(settings.grid.awq),
            heads=heads,
            precision="float32" if settings.precision == "float32" else "tf32",
        )
        attention = partial(source.family.observe_attention, source.model, module)
        either = attention if collector.value or collector.query_key else None
        # both streams are equal before block 0, and so is all that follows, unless the embedding is quantized
        own_stem = self.context.quantized_stem is not source
        differ = len(streams.original) > 0 and (index > 0 or own_stem)
        compare = differ and bool(settings.input_correction)
        originals = in_turn(streams.original, device)
        watching = partial(observing, module, collector.groups, mixture)
        with sending_back(streams.original, device) as replace_original:
            for i, quantized in enumerate(in_turn(streams.quantized, device)):
                original = None
                if compare:
                    with watching(residuals=first, experts=False) as original:
                        after = source.run_block(module, next(originals))
                elif differ and last:
                    after = source.run_block(module, next(originals))
                with watching(residuals=compare and first, experts=first, attention=either) as seen:
                    output = source.run_block(module, quantized)
                if streams.original and last:
                    replace_original(i, after if differ else output)
                collector.add(seen, original)
        if not self.context.world.alone:
            collector.add_up(self.context.world.sum_, counts=streams.own)
        if collector.experts is not None:
            self._complete(collector.experts, collector.tokens, module, streams)
        statistics = collector.finish(source.family.norm_weights(module))
        self._refuse_not_finite(index, statistics)
        return statistics

    def _complete(self, experts: ExpertSums, tokens: int, module: nn.Module, streams: Streams) -> None:
        """Complete the Hessians of experts that few tokens have reached, by another pass of all."""
        few, world, device = experts.scale(tokens), self.context.world, self.context.source.device
        if not few:
            return
        if not world.is_first:
            experts.clear(few)
        for quantized in in_turn(streams.quantized, device) if streams.own else ():
            with observing(module, [], experts.mixture) as seen:
                self.context.source.run_block(module, quantized)
            with torch.inference_mode():
                experts.see_all(module, seen.inputs[experts.mixture.module])
        if not world.alone:
            experts.add_up(few, world.sum_)

    def _refuse_not_finite(self, index: int, statistics: BlockStatistics) -> None:
        for name, tensor in statistics.named_tensors():
            if bool(torch.isfinite(tensor).all()):
                continue
            dtype = str(self.context.source.dtype).removeprefix("torch.")
            advice = "check model.pretrained"
            if dtype != "float32":
                advice = "continue with --model.dtype bfloat16, or float32 where that is not enough"
            raise UserError(
                f"block {index}: the statistic {name} has NaN or infinite values, so the model's "
                f"activations overflow in {dtype}: {advice}"
            )


def _move_values(statistics: BlockStatistics, values: MatricesOnDisk) -> list[Tensor]:
    """Append H_V to a file, and return the shift of the attention's output, if there is one."""
    values.append(cast(Hessian, statistics.attended)[:])
    found = statistics.shifts
    return [] if found is None or found.attended is None else [found.attended]
