"""Measure the statistics of one block for one more batch of segments, beside the block's own forward passes.

python benchmarks/block_statistics.py --model opt-125m --length 512

A block of random weights on random hidden states. *forward* is the block alone; *plain* the block and
the same statistics with one einsum over all heads for each, ``A X`` of all of them in memory at once.
*corrected* also runs the original model's hidden states through the block, and collects the shifts that the
correction of earlier errors needs; it stands beside two forward passes. A batch before the measured ones
begins the sums. They are made whole once, after all batches of a run: *finish* has the seconds of that with
the correction. Medians.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jsonargparse import auto_cli
from options import Options, begin
from report import median_of_each
from shapes import SHAPES, config
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from aespa_pl.calibration.collector import StatisticsCollector
from aespa_pl.calibration.observe import observing
from aespa_pl.models import family_of
from aespa_pl.models.family import Family
from aespa_pl.models.observed import Attention
from aespa_pl.settings.quantization import ObjectiveSettings

COLUMNS = [
    "model", "batch", "ours, s", "plain, s", "ratio", "forward, s", "ours / forward",
    "corrected, s", "corrected / 2 forward", "finish, s",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StatisticsOptions(Options):
    """Measure a block and print a table."""

    segments: int = 1
    """Number of segments in a batch."""
    length: int = 2048
    """Number of tokens in each segment."""
    corrected_only: bool = False
    """Leave out *ours* and *plain*, whose sums take the memory of *corrected* once and twice again."""
    value_tokens: int = ObjectiveSettings.value_tokens
    """Tokens that H_V is summed over for each column, at least; 0: all."""
    text: int = 128 * 2048
    """Number of tokens of the whole calibration text, of which a batch is a part."""


def main(options: StatisticsOptions) -> None:
    """Measure a block and print a table."""
    report = begin(options, COLUMNS, benchmark="block_statistics")
    segments, length, where = options.segments, options.length, torch.device(options.device)
    settings = config(SHAPES[options.model], length)
    family = family_of(settings)
    whole = AutoModelForCausalLM.from_config(settings).eval().to(where)
    block = whole.get_submodule(family.blocks_path)[0]
    hidden = torch.randn(segments, length, whole.config.hidden_size, device=where)
    layout, rows, text = family.layout(settings), options.value_tokens, options.text
    collectors = [
        StatisticsCollector(layout, value=True, query_key=True, value_tokens=rows, text=text)
        for _ in range(2)
    ]
    works: list[Callable[[], None]] = [
        partial(_ours, whole, family, block, hidden, collectors[0]),
        partial(_plain, whole, family, block, hidden, []),
        partial(_run, whole, family, block, hidden),
        partial(_corrected, whole, family, block, hidden, collectors[1]),
    ]
    if options.corrected_only:
        works[:2] = [lambda: None] * 2
    with torch.inference_mode():
        ours, plain, forward, corrected = median_of_each(works, options.repeats, where)
        began = time.perf_counter()
        collectors[1].finish()
        finish = time.perf_counter() - began
    report.row(
        [
            options.model, f"{segments} x {length}",
            *("..." if options.corrected_only else (f"{ours:.3f}", f"{plain:.3f}", f"{plain / ours:.2f}")),
            f"{forward:.3f}", "." if options.corrected_only else f"{ours / forward:.2f}",
            f"{corrected:.3f}", f"{corrected / forward / 2:.2f}", f"{finish:.3f}",
        ],
        segments=segments,
        length=length,
        ours=ours,
        plain=plain,
        forward=forward,
        corrected=corrected,
        finish=finish,
    )  # fmt: skip


def _run(model: PreTrainedModel, family: Family, block: nn.Module, hidden: Tensor) -> None:
    family.run_block(block, hidden, family.arguments(model, hidden))


def _ours(
    model: PreTrainedModel, family: Family, block: nn.Module, hidden: Tensor, collector: StatisticsCollector
) -> None:
    attention = partial(family.observe_attention, model, block)
    with observing(block, collector.layout.groups, attention=attention) as seen:
        _run(model, family, block, hidden)
    collector.add(seen)


def _corrected(
    model: PreTrainedModel, family: Family, block: nn.Module, hidden: Tensor, collector: StatisticsCollector
) -> None:
    attention = partial(family.observe_attention, model, block)
    with observing(block, collector.layout.groups, residuals=True) as original:
        _run(model, family, block, hidden)
    with observing(block, collector.layout.groups, residuals=True, attention=attention) as seen:
        _run(model, family, block, 1.1 * hidden)
    collector.add(seen, original)


def _plain(
    model: PreTrainedModel, family: Family, block: nn.Module, hidden: Tensor, sums: list[Tensor]
) -> None:
    found = _plain_batch(model, family, block, hidden)
    sums[:] = [total + part for total, part in zip(sums, found, strict=True)] if sums else found


def _plain_batch(model: PreTrainedModel, family: Family, block: nn.Module, hidden: Tensor) -> list[Tensor]:
    layout = family.layout(model.config)
    found: list[Tensor] = []
    seen: list[Attention] = []
    inputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, arguments: inputs.update({name: arguments[0]})

    handles = [
        block.get_submodule(g.projections[0].module).register_forward_pre_hook(keep(g.name))
        for g in layout.groups
    ]
    with family.observe_attention(model, block, seen.append):
        _run(model, family, block, hidden)
    for handle in handles:
        handle.remove()
    attention = seen[0]
    found += [torch.einsum("nd,ne->de", X, X) for X in (x.flatten(0, -2) for x in inputs.values())]
    A, X = attention.probabilities(), inputs[layout.groups[0].name]
    AX = torch.einsum("bhlm,bmd->hbld", A, X)
    found.append(torch.einsum("hbld,hble->hde", AX, AX))
    found += [torch.einsum("bhld,bhle->hde", Y, Y) for Y in (attention.query, attention.key)]
    return found


if __name__ == "__main__":
    main(auto_cli(StatisticsOptions))
