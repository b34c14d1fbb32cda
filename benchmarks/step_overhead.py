"""Measure what an iteration of the rounding costs outside of its arithmetic, for a whole block.

python benchmarks/step_overhead.py --models '[opt-125m]'
python benchmarks/step_overhead.py --models '[embedded]'    # the smallest block that anybody quantizes

The same block is learned by a bare loop (losses, gradients, Adam), by Lightning's Trainer with nothing
else, and by the Trainer of ``aespa-pl fit``: curves for TensorBoard every 20 iterations, a checkpoint a
minute, the look for a signal after each iteration. Measured is from the first iteration to the
last, on a CPU in processor seconds; what it takes to begin and to end is in *once*. They take turns; medians.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from jsonargparse import auto_cli
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from report import Report
from shapes import Problem, problems

from aespa_pl.algorithm.adaround import penalty_exponent
from aespa_pl.algorithm.grid import min_max_grid
from aespa_pl.algorithm.quantizer import GridFormat
from aespa_pl.algorithm.workspace import Workspace
from aespa_pl.commands.output import quiet
from aespa_pl.rounding import BlockRounding, ProjectionRounding, StatisticsDataModule
from aespa_pl.run.checkpointing import StopAtIteration, checkpoints
from aespa_pl.run.interruption import Interruption
from aespa_pl.settings import OutputSettings, RoundingSettings

COLUMNS = [
    "model", "loop, ms", "Trainer, ms", "fit, ms", "Lightning's share", "share of all", "once, s",
]  # fmt: skip
KINDS = ("loop", "trainer", "fit")
Clock = Callable[[], float]


def main(
    models: list[str] | None = None,
    *,
    iterations: int = 200,
    rows: int | None = None,
    repeats: int = 5,
    threads: int = 1,
    device: str = "cpu",
    output: Path | None = None,
) -> None:
    """Measure a block of each model and print a table.

    Args:
        models: Of SHAPES.
        iterations: In each measurement.
        rows: At most so many rows of each matrix (whole heads); None: all.
        repeats: Measurements that the median is taken of.
        threads: Threads of torch.
        device: Where.
        output: JSON lines are appended to this file.
    """
    torch.set_num_threads(threads)
    where = torch.device(device)
    report = Report(COLUMNS, output, benchmark="step_overhead", threads=threads, device=device)
    for model in models or ["embedded", "opt-125m"]:
        torch.manual_seed(0)
        block = list(problems(model, rows, where))
        with tempfile.TemporaryDirectory() as folder:
            works = list(_works(block, RoundingSettings(iterations=iterations), Path(folder), device))
            turns = [[work() for work in works] for _ in range(repeats + 1)][1:]
        # [turns, works, 2] to the medians [works, 2]
        medians = torch.tensor(turns, dtype=torch.float64).median(0).values
        seconds = (medians[:, 0] / iterations).tolist()
        once = float(medians[-1, 1] - medians[-1, 0])
        bare, lightning, everything = seconds
        report.row(
            [
                model, *(f"{1e3 * s:.2f}" for s in seconds),
                f"{1 - bare / lightning:.1%}", f"{1 - bare / everything:.1%}",
                f"{once:.2f}",
            ],
            model=model,
            iterations=iterations,
            once=once,
            **dict(zip(KINDS, seconds, strict=True)),
        )  # fmt: skip


class _Watch(Callback):
    """Measures from the first iteration to the last."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.began = self.clock()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seconds = self.clock() - self.began


def _works(
    block: list[Problem], settings: RoundingSettings, folder: Path, device: str
) -> Iterator[Callable[[], tuple[float, float]]]:
    """Yield the bare loop, the Trainer alone, and ``fit``'s Trainer; each returns seconds, and with all."""
    objective = {p.name: (p.H, p.G) for p in block}
    # other programs on the machine don't count
    clock = time.process_time if device == "cpu" else time.perf_counter

    def fit(callbacks: list[Callback], **options: Any) -> tuple[float, float]:
        began, watch = clock(), _Watch(clock)
        trainer = Trainer(
            accelerator="gpu" if device == "cuda" else device, devices=1, max_epochs=-1,
            max_steps=settings.iterations, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[*callbacks, watch], **options,
        )  # fmt: skip
        module = BlockRounding(_projections(block), settings, "block 0")
        trainer.fit(module, datamodule=StatisticsDataModule(objective))
        return watch.seconds, clock() - began

    yield lambda: bare_loop(block, settings, clock)
    yield lambda: fit([], logger=False, enable_checkpointing=False, log_every_n_steps=10**9)
    yield lambda: fit(
        [*checkpoints(OutputSettings(), folder), StopAtIteration(Interruption(), folder)],
        logger=TensorBoardLogger(folder),
        log_every_n_steps=20,
    )


def bare_loop(
    block: list[Problem], settings: RoundingSettings, clock: Clock = time.perf_counter
) -> tuple[float, float]:
    """Learn a block without Lightning; return seconds of the iterations, twice."""
    projections, workspace = _projections(block), Workspace()
    variables = [projection.variables for projection in projections.values()]
    adam = torch.optim.Adam(variables, lr=float(settings.learning_rate), fused=True)
    began = clock()
    for i in range(settings.iterations):
        beta = penalty_exponent(
            i, settings.iterations, warmup=settings.warmup, start=settings.beta_start,
            end=settings.beta_end,
        )  # fmt: skip
        for p in block:
            projection = projections[p.name]
            projection.loss(p.H, p.G, beta, workspace)
            projection.variables.grad = projection.gradient
        adam.step()
    seconds = clock() - began
    return seconds, seconds


def _projections(block: list[Problem]) -> dict[str, ProjectionRounding]:
    found = {}
    for p in block:
        grid = min_max_grid(p.W, torch.ones_like(p.W[0, 0]), GridFormat(2))
        found[p.name] = ProjectionRounding(p.W, p.W, grid, penalty=1.5)
    return found


if __name__ == "__main__":
    with quiet():
        auto_cli(main)
