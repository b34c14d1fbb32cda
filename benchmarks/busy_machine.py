"""Measure pieces of work with several threads while another process keeps a core busy.

python benchmarks/busy_machine.py --threads 2

Each line is a process of its own, because OpenMP reads its settings once. *turns* is how often a thread that
waits for the others looks again before it sleeps: ``aespa_pl`` sets 1,500. With 0 it sleeps at once; GNU's
OpenMP takes 300,000 where nothing is set, and such a thread takes the core of the one that it waits for.
Shapes of the embedded models, for the descent of SmolLM2-135M's query heads.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from jsonargparse import auto_cli
from report import Report

from aespa_pl.algorithm.adaround import SoftRounding, rounding_loss
from aespa_pl.algorithm.descent import descend
from aespa_pl.algorithm.grid import min_max_grid, search_grid
from aespa_pl.algorithm.quantizer import GridFormat, quantize
from aespa_pl.algorithm.second_moments import add_gram
from aespa_pl.algorithm.workspace import Workspace

ROWS, COLUMNS, TOKENS = 128, 512, 4096
BUSY = "while True: pass"
HEADS, HEAD_ROWS, WIDTH, PASSES = 9, 64, 576, 4
"""Query heads of the descent, and its passes."""


def main(
    threads: int = 2,
    *,
    turns: list[int] | None = None,
    seconds: float = 3.0,
    busy: int = 1,
    output: Path | None = None,
) -> None:
    """Measure learning, grid, statistics and descent, alone and beside busy processes, and print a table.

    Args:
        threads: Threads of torch.
        turns: Turns that a waiting thread spins before it sleeps; null: 0, 1000, 1500, 2000 and 300000.
        seconds: Seconds of each measurement.
        busy: Number of busy processes.
        output: JSON lines are appended to this file.
    """
    report = Report(
        ["turns", "busy processes", "learning, ms", "grid, ms", "statistics, ms", "descent, ms"],
        output,
        benchmark="busy_machine",
        threads=threads,
    )
    for spins in turns or [0, 1000, 1500, 2000, 300_000]:
        for count in (0, busy):
            others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
            try:
                found = _measured(spins, threads, seconds)
            finally:
                for other in others:
                    other.kill()
                    other.wait()
            cells = [f"{milliseconds:.2f}" for milliseconds in found.values()]
            report.row([spins, count, *cells], turns=spins, busy=count, **found)


def _measured(turns: int, threads: int, seconds: float) -> dict[str, float]:
    """Return milliseconds of each piece of work in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    command = f"import busy_machine; busy_machine.work({threads}, {seconds})"
    folder = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", command],
        env={
            **environment,
            # set from outside, because this file imports torch before aespa_pl
            "OMP_WAIT_POLICY": "passive",
            "GOMP_SPINCOUNT": str(turns),
            "PYTHONPATH": f"{folder}{os.pathsep}{folder.parent}",
        },
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return dict(json.loads(done.stdout))


def work(threads: int, seconds: float) -> None:
    """Print milliseconds a call of each piece of work, as JSON."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    W, X = 0.02 * torch.randn(1, ROWS, COLUMNS), torch.randn(TOKENS, COLUMNS)
    H = (X.T @ X / TOKENS + torch.eye(COLUMNS))[None]
    lower, scale = torch.ones(W.shape, dtype=torch.int16), torch.ones(1, ROWS, 1)
    rounding = SoftRounding(lower, W, W.abs(), scale, torch.ones(COLUMNS), 3)
    B, workspace, total = torch.randn_like(W), Workspace(), torch.zeros_like(H[0])
    two_bits = GridFormat(2, symmetric=False, group_size=None)
    works: dict[str, Callable[[], object]] = {
        "learning": lambda: rounding_loss(B, rounding, H, None, weight=0.01, beta=10.0, workspace=workspace),
        "grid": lambda: search_grid(W, H, torch.ones(COLUMNS), two_bits)[0],
        "statistics": lambda: add_gram(total, X),
        "descent": _descent(two_bits),
    }
    found = {}
    for name, call in works.items():
        call()
        calls, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            call()
            calls += 1
        found[name] = 1000 * (time.perf_counter() - began) / calls
    print(json.dumps(found))


def _descent(form: GridFormat) -> Callable[[], object]:
    W, X = torch.randn(HEADS, HEAD_ROWS, WIDTH), torch.randn(TOKENS, WIDTH)
    K = torch.randn(HEADS, TOKENS, HEAD_ROWS) @ torch.randn(HEAD_ROWS, HEAD_ROWS)
    H, G = (X.T @ X / TOKENS)[None], K.mT @ K / TOKENS
    grid = min_max_grid(W, torch.ones(WIDTH), form)
    integers = quantize(W, grid)
    return lambda: descend(integers, W, grid, H, G, passes=PASSES)


if __name__ == "__main__":
    auto_cli(main)
