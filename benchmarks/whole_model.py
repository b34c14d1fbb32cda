"""Measure ``aespa-pl fit`` on an embedded model beside the sum of its parts.

python benchmarks/whole_model.py --threads 2

The parts: what the run itself measured of each phase (its metrics.json), but for the learning, for which
the bare loop of ``step_overhead.py`` on a block of that shape is taken, times iterations and blocks.
*rest* is what the process took beyond all phases: Python, imports, reading, sampling of the text.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from jsonargparse import auto_cli
from report import Report
from shapes import problems
from step_overhead import bare_loop

from aespa_pl.commands.fit import PHASES
from aespa_pl.settings import RoundingSettings

MODEL, BLOCKS = "embedded:opt", 3
COLUMNS = ["fit, s", "parts, s", "ratio", "learning, s", "bare loop, s", "rest, s"]


def main(
    *, iterations: int = 2000, segments: int = 128, threads: int = 1, output: Path | None = None
) -> None:
    """Quantize the model, measure a bare iteration, and print a table.

    Args:
        iterations: Of the rounding.
        segments: Of calibration text.
        threads: Threads of torch.
        output: JSON lines are appended to this file.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    whole, phases = _fit(iterations, segments, threads)
    block = list(problems("embedded", None, torch.device("cpu")))
    settings = RoundingSettings(iterations=iterations)
    loop = BLOCKS * bare_loop(block, settings)[0]
    parts = sum(seconds for name, seconds in phases.items() if name != "rounding") + loop
    rest = whole - sum(phases.values())
    report = Report(COLUMNS, output, benchmark="whole_model", threads=threads)
    report.row(
        [f"{x:.1f}" for x in (whole, parts)]
        + [f"{whole / parts:.2f}"]
        + [f"{x:.1f}" for x in (phases["rounding"], loop, rest)],
        fit=whole,
        parts=parts,
        phases=phases,
        loop=loop,
        iterations=iterations,
    )


def _fit(iterations: int, segments: int, threads: int) -> tuple[float, dict[str, float]]:
    """Return the seconds of the process, and the seconds of its phases."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = {
            "model.pretrained": MODEL,
            "quantization.method": "aespa",
            "data.calibration.source": "embedded",
            "data.calibration.segments": segments,
            "data.calibration.segment_length": 256,
            "data.evaluation.texts": "[]",
            "data.cache": f"{folder}/cache",
            "quantization.rounding.iterations": iterations,
            "output.folder": f"{folder}/runs",
            "trainer.accelerator": "cpu",
        }
        words = [f"--{key}={value}" for key, value in arguments.items()]
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "aespa_pl", "fit", *words],
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        seconds = time.perf_counter() - began
        metrics = json.loads(next(Path(folder).rglob("metrics.json")).read_text())
    phases = {name: s for name, s in metrics["seconds"].items() if name in PHASES}
    return seconds, phases


if __name__ == "__main__":
    auto_cli(main)
