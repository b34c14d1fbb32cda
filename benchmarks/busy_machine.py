"""Measure pieces of work with several threads while another process keeps a core busy.

python benchmarks/busy_machine.py --threads 2

Each line is a process of its own, because OpenMP reads its settings once. *ours* is what ``aespa_pl`` sets:
a thread that waits for the others spins 2,000 turns, and then sleeps. In *passive* it sleeps at once.
*default* is GNU OpenMP's own: it spins 300,000 turns, and takes the core of the thread that it waits for.
Shapes of the embedded models.
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
from aespa_pl.algorithm.grid import search_grid
from aespa_pl.algorithm.quantizer import GridFormat
from aespa_pl.algorithm.second_moments import add_gram
from aespa_pl.algorithm.workspace import Workspace

ROWS, COLUMNS, TOKENS = 128, 512, 4096
BUSY = "while True: pass"
WAITING = {
    "ours": {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "2000"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "default": {"GOMP_SPINCOUNT": "300000"},
}
"""Variables for the process, set from outside because this file imports torch first."""


def main(
    threads: int = 2, *, seconds: float = 3.0, busy: int = 1, output: Path | None = None
) -> None:
    """Measure learning, grid and statistics, alone and beside busy processes, and print a table.

    Args:
        threads: Threads of torch.
        seconds: Seconds of each measurement.
        busy: Number of busy processes.
        output: JSON lines are appended to this file.
    """
    report = Report(
        ["waiting", "busy processes", "learning, ms", "grid, ms", "statistics, ms"],
        output,
        benchmark="busy_machine",
        threads=threads,
    )
    for waiting in WAITING:
        for count in (0, busy):
            others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
            try:
                found = _measured(waiting, threads, seconds)
            finally:
                for other in others:
                    other.kill()
                    other.wait()
            cells = [f"{milliseconds:.2f}" for milliseconds in found.values()]
            report.row([waiting, count, *cells], waiting=waiting, busy=count, **found)


def _measured(waiting: str, threads: int, seconds: float) -> dict[str, float]:
    """Return milliseconds of each piece of work in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    command = f"import busy_machine; busy_machine.work({threads}, {seconds})"
    folder = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", command],
        env={
            **environment,
            **WAITING[waiting],
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
        "learning": lambda: rounding_loss(
            B, rounding, H, None, weight=0.01, beta=10.0, workspace=workspace
        ),
        "grid": lambda: search_grid(W, H, torch.ones(COLUMNS), two_bits),
        "statistics": lambda: add_gram(total, X),
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


if __name__ == "__main__":
    auto_cli(main)
