"""Run the calibration segments through a block, and collect its statistics (step 1)."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from aespa_pl.calibration.collector import StatisticsCollector
from aespa_pl.calibration.experts import ExpertSums
from aespa_pl.calibration.observe import observing
from aespa_pl.calibration.statistics import BlockStatistics, DividedStatistics, refuse_not_finite
from aespa_pl.run.context import Context
from aespa_pl.storage.batches import Batches

Part = tuple[range, range]  # heads whose H_V, and experts whose statistics, are collected in one pass


@dataclass
class Streams:
    """Holds the hidden states of the calibration segments before the block under way, in batches."""

    quantized: Batches  # made by the blocks quantized so far
    original: Batches  # of the original model; empty where neither input_correction nor tuning needs them
    own: bool  # whether they are this process's; if they are another's, they only tell the shapes here
    tokens: int  # number of tokens of the whole calibration text

    @classmethod
    def begin(cls, context: Context, tokens: Tensor) -> "Streams":
        """Embed this process's part of the calibration segments ``[segments, L]``."""
        mine = context.world.segments(tokens, context.batch_size)
        own = len(mine) > 0
        mine = mine if own else tokens[:1]
        quantized = context.quantized_stem.embed(mine, context.batch_size)
        if not context.settings.two_streams:
            return cls(quantized, [], own, tokens.numel())
        if context.quantized_stem is not context.source:
            return cls(quantized, context.source.embed(mine, context.batch_size), own, tokens.numel())
        again = (quantized[i] for i in range(len(quantized)))
        return cls(quantized, context.source.keep(again), own, tokens.numel())


def collect(context: Context, index: int, module: nn.Module, streams: Streams) -> BlockStatistics:
    """Return the statistics of a block; the original model's hidden states go on to the next one.

    ``module`` has its original weights. Where the partition wants it, H_V is collected of some heads, and
    the statistics of some experts, at a time; what is divided waits on disk. Raises UserError where a
    statistic is not finite: activations overflow.
    """
    layout = context.layout(index)
    attended = layout.quantizes_values and context.settings.objective.value == "attention"
    heads = layout.key_value_heads if attended else 0
    experts = 0 if layout.mixture is None else layout.mixture.total
    passes = context.partition.passes(heads, experts)
    some, few = passes[0]
    divided = DividedStatistics(
        layout, context.run.folder, context.device, heads=len(some) < heads, experts=len(few) < experts
    )
    for number, part in enumerate(passes):
        first, last = number == 0, part is passes[-1]
        statistics = _run_through(context, index, module, streams, part, first=first, last=last)
        for name, tensor in statistics.named_tensors():
            refuse_not_finite(tensor, f"block {index}: the statistic {name} has", context.source.dtype)
        divided.add(statistics)
        del statistics  # and with it the memory of its heads, before that of the next ones is taken
    return divided.joined()


def _run_through(
    context: Context, index: int, module: nn.Module, streams: Streams, part: Part, *, first: bool, last: bool
) -> BlockStatistics:
    """Run all segments through a block and collect a part of its statistics; all others the first time."""
    source, settings = context.source, context.settings
    (heads, experts), layout = part, context.layout(index)
    attends = layout.attended_group is not None
    collector = StatisticsCollector(
        layout,
        value=len(heads) > 0,
        query_key=attends and first and settings.objective.couples_scores,
        inputs=first,
        magnitudes=bool(settings.grid.awq),
        heads=heads,
        experts=experts,
        precision="float32" if settings.precision == "float32" else "tf32",
        value_tokens=settings.objective.value_tokens,
        text=streams.tokens,
    )
    attention = partial(source.family.observe_attention, source.model, module)
    either = attention if collector.value or collector.query_key else None
    # both streams are equal before block 0, and so is all that follows, unless the embedding is quantized
    differ = len(streams.original) > 0 and (index > 0 or context.quantized_stem is not source)
    compare = differ and bool(settings.input_correction)
    watching = partial(observing, module, layout.groups, layout.mixture if experts else None)
    for i in range(len(streams.quantized)):
        quantized, original = streams.quantized[i], None
        if compare:
            with watching(residuals=True, experts=False) as original:
                after = source.run_block(module, streams.original[i])
        elif differ and last:
            after = source.run_block(module, streams.original[i])
        with watching(residuals=compare, experts=len(experts) > 0, attention=either) as seen:
            output = source.run_block(module, quantized)
        if streams.original and last:
            streams.original[i] = (after if differ else output).to(quantized.device)
        collector.add(seen, original)
    if not context.world.alone:
        collector.add_up(context.world.sum_, counts=streams.own)
    if collector.experts is not None:
        _complete(context, collector.experts, collector.tokens, module, streams)
    return collector.finish(source.family.norm_weights(module))


def _complete(
    context: Context, experts: ExpertSums, tokens: int, module: nn.Module, streams: Streams
) -> None:
    """Complete the Hessians of experts that few tokens have reached, by another pass of all."""
    few, world = experts.scale(tokens), context.world
    if not few:
        return
    if not world.is_first:
        experts.clear(few)
    for i in range(len(streams.quantized) if streams.own else 0):
        with observing(module, [], experts.mixture) as seen:
            context.source.run_block(module, streams.quantized[i])
        with torch.inference_mode():
            experts.see_all(module, seen.inputs[experts.mixture.module])
    if not world.alone:
        experts.add_up(few, world.sum_)
