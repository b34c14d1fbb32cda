"""Measure the seconds and the bytes sent of one process and two.

    python benchmarks/scaling.py --output scaling.jsonl

It runs ``aespa-pl fit`` of a LLaMA-type model with random weights on the CPU, each process with one
thread, connected by gloo. There should be a core for each. Bytes are what each process sends, if sums and
gathers go round a ring.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from jsonargparse import auto_cli
from transformers import LlamaConfig, LlamaForCausalLM

from aespa_pl.data.texts import EMBEDDED

PROGRAM = """
import atexit
import json
import sys
from torch import distributed

sent = {"bytes": 0.0, "calls": 0}

def count(size):
    processes = distributed.get_world_size()
    sent["bytes"] += size * (processes - 1) / processes
    sent["calls"] += 1

def all_reduce(tensor, *arguments, **options):
    count(2 * tensor.nbytes)
    return reduce(tensor, *arguments, **options)

def all_gather(parts, *arguments, **options):
    count(sum(part.nbytes for part in parts))
    return gather(parts, *arguments, **options)

reduce, gather = distributed.all_reduce, distributed.all_gather
distributed.all_reduce, distributed.all_gather = all_reduce, all_gather
atexit.register(lambda: print(json.dumps(sent), file=sys.stderr))

from aespa_pl.__main__ import main
main()
"""
"""The command line, with what torch.distributed sends of tensors counted and printed at the end."""


def main(
    *,
    processes: tuple[int, ...] = (1, 2),
    hidden: int = 256,
    intermediate: int = 768,
    heads: int = 8,
    blocks: int = 2,
    segments: int = 16,
    length: int = 256,
    rounds: int = 1,
    iterations: int = 200,
    output: Path | None = None,
) -> None:
    """Measure, and print a table.

    Args:
        processes: Numbers of processes to measure.
        hidden: Hidden size of the measured model.
        intermediate: Width of its feed-forward part.
        heads: Its heads.
        blocks: Its blocks.
        segments: Calibration segments.
        length: Tokens in each.
        rounds: Of Z-Fold, at most.
        iterations: Of the rounding.
        output: JSON lines are appended to this file.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        config = LlamaConfig(
            hidden_size=hidden, intermediate_size=intermediate, num_attention_heads=heads,
            num_key_value_heads=heads, num_hidden_layers=blocks, max_position_embeddings=length,
        )  # fmt: skip
        _make_model(config, Path(folder) / "model")
        print(f"hidden size {hidden}, {blocks} blocks; all phases are in the JSON lines")
        print("| processes | seconds | of rounding | speed-up | MB sent | calls |")
        print("|---|---|---|---|---|---|")
        for count in processes:
            options = {
                "data.calibration.segments": segments,
                "data.calibration.segment_length": length,
                "quantization.grid.max_rounds": rounds,
                "quantization.rounding.iterations": iterations,
            }
            row = _measured(Path(folder), count, options)
            rows.append({"hidden": hidden, "blocks": blocks, **row})
            speed_up = rows[0]["seconds"]["quantization"] / row["seconds"]["quantization"]
            print(
                f"| {count} | {row['seconds']['quantization']:.1f} | {row['seconds']['rounding']:.1f} "
                f"| {speed_up:.2f} | {row['bytes'] / 1e6:.1f} | {row['calls']} |",
                flush=True,
            )
    if output is not None:
        with output.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def _measured(folder: Path, count: int, options: dict[str, Any]) -> dict[str, Any]:
    """Run fit in so many processes; a failure ends the benchmark."""
    arguments = {
        "model.pretrained": folder / "model",
        "quantization.method": "aespa",
        "data.calibration.source": "embedded",
        "data.evaluation.texts": "[]",
        "data.batch_size": 1,
        "data.cache": folder / "cache",
        "output.folder": folder / "runs",
        "output.name": count,
        "trainer.accelerator": "cpu",
        "trainer.devices": count,
        "trainer.logger": "false",
        **options,
    }
    words = ["fit", *(f"--{key}={value}" for key, value in arguments.items())]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = []
    for rank in range(count):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if count > 1:
            environment |= {
                "LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
    errors = [process.communicate()[1] for process in running]
    if any(process.returncode for process in running):
        sys.exit("\n".join(errors))
    (run,) = (folder / "runs" / str(count)).glob("version_*")
    metrics = json.loads((run / "metrics.json").read_text())
    (sent,) = (line for line in errors[0].splitlines() if line.startswith('{"bytes": '))
    return {"processes": count, "seconds": metrics["seconds"], **json.loads(sent)}


def _make_model(config: LlamaConfig, folder: Path) -> None:
    """Write random weights, with the tokenizer of an embedded model."""
    torch.manual_seed(0)
    embedded = json.loads((EMBEDDED / "llama" / "config.json").read_text())
    config.vocab_size = embedded["vocab_size"]
    LlamaForCausalLM(config).save_pretrained(folder)
    for path in (EMBEDDED / "llama").iterdir():
        if path.name.startswith("tokenizer"):
            (folder / path.name).write_bytes(path.read_bytes())


if __name__ == "__main__":
    auto_cli(main)
