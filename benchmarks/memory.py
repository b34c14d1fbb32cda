"""Measure peak memory and seconds of ``aespa-pl fit`` by phase, on random models, beside what ``plan`` says.

python benchmarks/memory.py --shape smollm2-135m --methods '[aespa, aespa-tuned]' --iterations 10
python benchmarks/memory.py --shape llama-7b --methods '[aespa]' --iterations 10      # one block, 20 GB
python benchmarks/memory.py --blocks 24 --vocabulary 32000                            # a narrow model
python benchmarks/memory.py --hidden 512 --intermediate 256 --experts 64              # Qwen3-MoE
python benchmarks/memory.py --shape llama-7b --accelerator gpu                        # memory of the GPU

Each run is a process of its own under Linux, which resets its peak when a phase begins. *plan* is what
``aespa_pl/planning/needs.py`` says of the phase, on a CPU with the process and the hidden states in memory;
*nothing* is what the process has between phases, and *all* the largest. On a GPU the peak is that of the
tensors that torch has there. The clip search tries 2 ratios instead of 100
(``--ratios``): that changes seconds, not memory.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from jsonargparse import auto_cli
from report import Report
from safetensors.torch import save_file
from shapes import SHAPES, Shape, config
from transformers import PreTrainedConfig

from aespa_pl.__main__ import set_threads
from aespa_pl.algorithm import grid
from aespa_pl.cli import main as aespa_pl
from aespa_pl.commands.job import Job
from aespa_pl.data.texts import EMBEDDED
from aespa_pl.measure import Stopwatch
from aespa_pl.models.headers import skeleton
from aespa_pl.planning.needs import PROCESS_BYTES, device_bytes, hidden_bytes
from aespa_pl.planning.shape import Setup
from aespa_pl.run.context import Context
from aespa_pl.settings import MethodName
from aespa_pl.walk.walk import Walk

CHILD = "--child"
"""First argument of a process that is measured."""
PLANNED = {"optq": "OPTQ", "tuning": "tuning of blocks", "tuning the model": "tuning of the model"}
"""Names that plan has for phases of a run, where they differ."""
NOTHING = "nothing"


def main(
    *,
    shape: str | None = None,
    hidden: int = 512,
    intermediate: int = 1376,
    heads: int = 8,
    blocks: int = 1,
    experts: int = 0,
    vocabulary: int = 1024,
    segments: int = 8,
    length: int = 512,
    iterations: int = 2,
    ratios: int = 2,
    dtype: str = "bfloat16",
    threads: int = 1,
    accelerator: Literal["cpu", "gpu"] = "cpu",
    methods: tuple[MethodName, ...] = ("aespa",),
    options: list[str] | None = None,
    output: Path | None = None,
) -> None:
    """Make a model, quantize it with each method, and print peak and seconds of each phase.

    Args:
        shape: One of SHAPES, in place of hidden, intermediate and heads.
        hidden: Hidden size.
        intermediate: Width of the feed-forward part.
        heads: Query and key/value heads.
        blocks: Number of blocks.
        experts: Experts of a block, of which each token has 8; 0: it is dense.
        vocabulary: Rows of the embedding and of the head, at least 1024.
        segments: Calibration segments.
        length: Tokens in each.
        iterations: Of the rounding.
        ratios: Clipping ratios that a search of the grid tries.
        dtype: Of the weights and of the blocks while they run.
        threads: Threads of torch.
        accelerator: As trainer.accelerator.
        methods: As quantization.method, one after the other.
        options: More options of aespa-pl fit, such as ``--quantization.group_size=64``.
        output: File that JSON lines are appended to.
    """
    sizes = SHAPES[shape] if shape else Shape(hidden, intermediate, heads, gated=True)
    model = config(sizes, length, blocks, vocabulary, experts)
    model.dtype = getattr(torch, dtype)
    columns = ["method", "phase", "peak, GB", "plan, GB", "peak / plan", "seconds"]
    report = Report(columns, output, shape=shape, blocks=blocks, segments=segments, length=length)
    with tempfile.TemporaryDirectory() as folder:
        _make_model(model, Path(folder) / "model")
        arguments = {
            "model.pretrained": f"{folder}/model",
            "model.dtype": dtype,
            "data.calibration.source": "embedded",
            "data.calibration.segments": segments,
            "data.calibration.segment_length": length,
            "data.evaluation.texts": "[]",
            "data.hidden_states": "disk",
            "data.batch_size": 1,
            "data.cache": f"{folder}/cache",
            "quantization.rounding.iterations": iterations,
            "quantization.grid.zfold": "false",
            "output.folder": f"{folder}/runs",
            "trainer.accelerator": accelerator,
            "trainer.logger": "false",
        }
        words = [f"--{key}={value}" for key, value in arguments.items()]
        for method in methods:
            more = [f"--quantization.method={method}", *(options or [])]
            for row in _run([*words, *more], Path(folder) / "phases.json", threads, ratios):
                planned = row["planned"]
                cells = (
                    ["", ""] if planned is None else [f"{planned / 1e9:.2f}", f"{row['peak'] / planned:.2f}"]
                )
                cells = [f"{row['peak'] / 1e9:.2f}", *cells, f"{row['seconds']:.1f}"]
                report.row([method, row["phase"], *cells], method=method, **row)


def _run(arguments: list[str], result: Path, threads: int, ratios: int) -> list[dict[str, Any]]:
    """Return what a process has measured; its failure ends the benchmark."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, __file__, CHILD, str(result), str(ratios), "fit", *arguments]
    status = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False).returncode
    if status:
        sys.exit(f"aespa-pl ended with status {status}")
    rows: list[dict[str, Any]] = json.loads(result.read_text())
    return rows


@dataclass
class Phases:
    """Notes peak and seconds of each phase of the run in this process."""

    peaks: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    under_way: list[str] = field(default_factory=lambda: [NOTHING])
    setup: Setup | None = None
    context: Context | None = None

    def take(self) -> None:
        """Add the peak since the last call to the phase that is under way."""
        phase = self.under_way[-1]
        if self.setup is not None and self.setup.device.type == "cuda":
            self.peaks[phase] = max(self.peaks[phase], torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
            return
        status = Path("/proc/self/status").read_text()
        peak = 1024 * int(re.findall(r"VmHWM:\s+(\d+)", status)[0])
        self.peaks[phase] = max(self.peaks[phase], peak)
        Path("/proc/self/clear_refs").write_text("5")

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Let the package tell of its phases and its settings in this context."""
        measure, setup_of, begin = Stopwatch.measure, Job.setup, Walk.__init__

        @contextmanager
        def measured(stopwatch: Stopwatch, phase: str, device: torch.device) -> Iterator[None]:
            self.take()
            self.under_way.append(phase)
            try:
                with measure(stopwatch, phase, device):
                    yield
            finally:
                self.take()
                self.under_way.pop()

        def setup(job: Job, *devices: Any) -> Setup:
            self.setup = setup_of(job, *devices)
            return self.setup

        def begun(walk: Walk, context: Context) -> None:
            self.context = context
            begin(walk, context)

        with (
            patch.object(Stopwatch, "measure", measured),
            patch.object(Job, "setup", setup),
            patch.object(Walk, "__init__", begun),
        ):
            yield

    def rows(self) -> list[dict[str, Any]]:
        """Return peak and seconds by phase, beside the bytes that are planned."""
        self.take()
        setup, context = self.setup, self.context
        if setup is None or context is None:
            raise ValueError("nothing was quantized")
        planned = device_bytes(setup, context.partition, recompute=context.recompute)
        always = 0 if setup.device.type == "cuda" else PROCESS_BYTES
        if setup.data.hidden_states != "disk":
            always += hidden_bytes(setup.shape, setup.work, setup.quantization)
        seconds = context.stopwatch.seconds
        rows = [
            (phase, peak, always + needed if (needed := planned.get(PLANNED.get(phase, phase))) else None)
            for phase, peak in self.peaks.items()
        ]
        rows.append(("all", max(self.peaks.values()), always + max(planned.values())))
        return [
            {"phase": phase, "peak": peak, "planned": needed, "seconds": seconds.get(phase, 0.0)}
            for phase, peak, needed in rows
        ]


def _child(result: str, ratios: int, arguments: list[str]) -> None:
    """Run ``aespa-pl`` with arguments, and write what was measured to a file."""
    set_threads()
    grid.CLIP_RATIOS = ratios
    phases = Phases()
    with phases.watching():
        aespa_pl(arguments)
    Path(result).write_text(json.dumps(phases.rows()))


def _make_model(model: PreTrainedConfig, folder: Path) -> None:
    """Write random weights shard by shard, so that this process stays small."""
    folder.mkdir(parents=True, exist_ok=True)
    made = skeleton(model)
    model.architectures = [type(made).__name__]
    model.save_pretrained(folder)
    shards: dict[str, dict[str, torch.Size]] = {}
    for name, parameter in made.named_parameters():
        number = next((part for part in name.split(".") if part.isdigit()), "stem")
        shards.setdefault(number, {})[name] = parameter.shape
    where: dict[str, str] = {}
    for number, shapes in shards.items():
        tensors = {
            name: torch.ones(size) if len(size) == 1 else 0.02 * torch.randn(size)
            for name, size in shapes.items()
        }
        stored = {name: tensor.to(model.dtype) for name, tensor in tensors.items()}
        save_file(stored, folder / f"model-{number}.safetensors", {"format": "pt"})
        where |= dict.fromkeys(shapes, f"model-{number}.safetensors")
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for path in (EMBEDDED / "llama").iterdir():
        if path.name.startswith("tokenizer"):
            (folder / path.name).write_bytes(path.read_bytes())


if __name__ == "__main__":
    if sys.argv[1:2] == [CHILD]:
        _child(sys.argv[2], int(sys.argv[3]), sys.argv[4:])
    else:
        auto_cli(main)
