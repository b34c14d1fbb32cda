"""Seconds of one iteration of the rounding, for the projections of known models, beside plain autograd.

python benchmarks/rounding_step.py --model opt-125m --threads 2
python benchmarks/rounding_step.py --model llama-7b --rows 256        # fewer rows of each matrix

Random weights and statistics: no model is needed. In the same run are measured the matrix product alone,
and two plain forms of the same mathematics with autograd and ``torch.optim.Adam``, one projection after the
other: *trace* computes ``tr(G dW H dW^T)`` as it is written, *sum* as ``sum(dW * (G dW H))``. Medians;
--output appends JSON lines.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from jsonargparse import auto_cli
from torch import Tensor

from aespa_pl.algorithm.adaround import SoftRounding, rounding_loss, start
from aespa_pl.algorithm.grid import min_max_grid
from aespa_pl.algorithm.objectives import error_product
from aespa_pl.algorithm.workspace import Workspace

BETA, WEIGHT = 8.0, 1.5
HEADER = "| projection | shape | ours, ms | trace, ms | ratio | sum, ms | ratio | product, ms | its share |"
SHAPES: dict[str, tuple[int, int, int, bool]] = {
    "opt-125m": (768, 3072, 12, False),
    "opt-1.3b": (2048, 8192, 32, False),
    "opt-6.7b": (4096, 16384, 32, False),
    "llama-7b": (4096, 11008, 32, True),
    "llama-30b": (6656, 17920, 52, True),
}
"""Hidden size, feed-forward size, heads, and whether the feed-forward part is gated."""


def projections(model: str) -> dict[str, tuple[int, int, int, str]]:
    """Return heads, rows of a head, columns and the kind of objective of each projection."""
    hidden, wide, heads, gated = SHAPES[model]
    head = hidden // heads
    found = {
        "q_proj": (heads, head, hidden, "G"),
        "k_proj": (heads, head, hidden, "G"),
        "v_proj": (heads, head, hidden, "H_V"),
        "out_proj": (1, hidden, hidden, "H"),
    }
    if gated:
        names = {"gate_proj": (1, wide, hidden, "H"), "up_proj": (1, wide, hidden, "H")}
        return {**found, **names, "down_proj": (1, hidden, wide, "H")}
    return {**found, "fc1": (1, wide, hidden, "H"), "fc2": (1, hidden, wide, "H")}


def main(
    model: str = "opt-125m",
    *,
    rows: int | None = None,
    repeats: int = 7,
    threads: int = 1,
    device: str = "cpu",
    output: Path | None = None,
) -> None:
    """Measure each projection and print a table.

    Args:
        model: One of SHAPES.
        rows: At most so many rows of each matrix (whole heads); None: all.
        repeats: Calls that the median is taken of.
        threads: Threads of torch.
        device: Where.
        output: JSON lines are appended to this file.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    print(HEADER)
    print("|---|---|---|---|---|---|---|---|---|")
    total = [0.0] * 4
    for name, (all_heads, head_rows, columns, kind) in projections(model).items():
        heads, size = all_heads, head_rows
        if rows is not None:
            heads = max(1, min(heads, rows // size)) if kind != "H" else 1
            size = min(size, rows)
        problem = _problem((heads, size, columns), kind, torch.device(device))
        seconds = [_median(step, repeats, torch.device(device)) for step in _steps(*problem)]
        total = [a + b for a, b in zip(total, seconds, strict=True)]
        _print(f"{name} | {heads * size} x {columns}", seconds)
        if output:
            row = {"model": model, "projection": name, "rows": heads * size, "columns": columns}
            row |= dict(zip(("ours", "trace", "sum", "product"), seconds, strict=True))
            row |= {"threads": threads, "device": device}
            with output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    _print("block | ", total)


def _print(label: str, seconds: list[float]) -> None:
    ours, trace, plain, product = seconds
    print(
        f"| {label} | {1e3 * ours:.2f} | {1e3 * trace:.2f} | {trace / ours:.2f} | "
        f"{1e3 * plain:.2f} | {plain / ours:.2f} | {1e3 * product:.2f} | {product / ours:.0%} |",
        flush=True,
    )


def _problem(
    shape: tuple[int, int, int], kind: str, device: torch.device
) -> tuple[SoftRounding, Tensor, Tensor, Tensor | None]:
    """Return the fixed part, the rounding variables, H and G of a projection with random weights."""
    heads, rows, columns = shape
    W = 0.02 * torch.randn(shape, device=device)
    count = heads if kind == "H_V" else 1
    X = torch.randn(count, 2 * columns, columns, device=device)
    H = X.mT @ X / (2 * columns)
    del X
    G = None
    if kind == "G":
        K = torch.randn(heads, 4 * rows, rows, device=device)
        G = K.mT @ K / (4 * rows)
    grid = min_max_grid(
        W, torch.ones(columns, device=device), bits=2, symmetric=False, group_size=None
    )
    return *start(W, W, grid), H, G


def _steps(
    rounding: SoftRounding, B: Tensor, H: Tensor, G: Tensor | None
) -> Iterator[Callable[[], object]]:
    """Yield what is measured, one after the other."""
    yield _ours(rounding, B.clone(), H, G)
    yield _autograd(rounding, B.clone(), H, G, trace=True)
    yield _autograd(rounding, B.clone(), H, G, trace=False)
    dW = torch.randn_like(B)
    yield lambda: error_product(dW, H, G)


def _ours(rounding: SoftRounding, B: Tensor, H: Tensor, G: Tensor | None) -> Callable[[], None]:
    parameter, workspace = torch.nn.Parameter(B), Workspace()
    adam = torch.optim.Adam([parameter], lr=0.015, fused=True)

    def step() -> None:
        b = parameter.detach()
        gradient = workspace.like("gradient", b)
        rounding_loss(
            b, rounding, H, G, weight=WEIGHT, beta=BETA, workspace=workspace, gradient=gradient
        )
        parameter.grad = gradient
        adam.step()

    return step


def _autograd(
    rounding: SoftRounding, B: Tensor, H: Tensor, G: Tensor | None, *, trace: bool
) -> Callable[[], None]:
    parameter = torch.nn.Parameter(B)
    adam = torch.optim.Adam([parameter], lr=0.015)

    def step() -> None:
        h = torch.clamp(1.2 * torch.sigmoid(parameter) - 0.1, 0, 1)
        dW = rounding.base + rounding.gain * h
        if trace:
            inner = dW @ H @ dW.mT  # [heads, rows, rows]
            inner = inner if G is None else G @ inner
            loss = inner.diagonal(dim1=-2, dim2=-1).sum()
        else:
            loss = (dW * error_product(dW, H, G)).sum()
        loss = loss + WEIGHT * (1 - (2 * h - 1).abs().pow(BETA)).sum()
        adam.zero_grad()
        loss.backward()
        adam.step()

    return step


def _median(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    work()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


if __name__ == "__main__":
    auto_cli(main)
