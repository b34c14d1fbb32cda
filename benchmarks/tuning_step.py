"""Measure a step of a block's tuning, optimizer included, beside a forward pass of the block.

python benchmarks/tuning_step.py --model tinyllama-1.1b
python benchmarks/tuning_step.py --model smollm2-135m --lengths '[512, 2048]' --products bfloat16

Random weights of LLaMA's shapes, 2 bits per channel, integers and scales that learn, one segment. Lightning
and the read of the segment are left out. Medians.
"""

from collections.abc import Sequence
from functools import partial

import torch
from jsonargparse import auto_cli
from report import Report, median_of_each
from shapes import SHAPES, config
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from transformers import AutoModelForCausalLM

from aespa_pl.__main__ import set_threads
from aespa_pl.algorithm.grid import min_max_grid
from aespa_pl.algorithm.objectives import Precision, multiplying_in
from aespa_pl.algorithm.quantizer import GridFormat, QuantizedWeight, quantize
from aespa_pl.tuning.parametrization import StraightThrough


def main(
    *,
    model: str = "tinyllama-1.1b",
    lengths: Sequence[int] = (512, 2048),
    products: Precision = "float32",
    repeats: int = 5,
    threads: int = 1,
) -> None:
    """Print a row for each length of a segment."""
    set_threads()
    torch.set_num_threads(threads)
    report = Report(["tokens", "forward pass, s", "step, s", "ratio"], None)
    for length in lengths:
        network = AutoModelForCausalLM.from_config(config(SHAPES[model], length), dtype=torch.float32)
        block = network.model.layers[0]
        X = torch.randn(1, length, SHAPES[model].hidden)
        run = {"position_embeddings": network.model.rotary_emb(X, torch.arange(length)[None])}
        target = X + 0.01 * torch.randn_like(X)
        forward = partial(_forward, block, X, run)
        seconds = median_of_each([forward], repeats, torch.device("cpu"))
        for linear in [m for m in block.modules() if isinstance(m, nn.Linear)]:
            register_parametrization(linear, "weight", _parametrization(linear.weight.detach()))
        adam = torch.optim.Adam(block.parameters(), fused=True)
        step = partial(_step, block, X, run, target, adam)
        with multiplying_in(products):
            seconds += median_of_each([step], repeats, torch.device("cpu"))
        report.row([length, *(f"{s:.2f}" for s in seconds), f"{seconds[1] / seconds[0]:.2f}"])


def _parametrization(W: Tensor) -> StraightThrough:
    grid = min_max_grid(W[None], torch.ones_like(W[0]), GridFormat(2, symmetric=False, group_size=None))
    integers = quantize(W[None], grid)[0].to(torch.uint8)
    return StraightThrough(QuantizedWeight(integers, grid.scale[0], grid.zero_point[0], 2), W)


@torch.inference_mode()
def _forward(block: nn.Module, X: Tensor, run: dict[str, Tensor]) -> None:
    block(X, **run)


def _step(
    block: nn.Module, X: Tensor, run: dict[str, Tensor], target: Tensor, adam: torch.optim.Adam
) -> None:
    adam.zero_grad()
    (block(X, **run) - target).square().mean().backward()
    adam.step()


if __name__ == "__main__":
    auto_cli(main)
