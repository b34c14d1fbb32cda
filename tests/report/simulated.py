"""Simulate runs: folders such as a run leaves, with invented numbers and any number of blocks."""

import json
import math
from pathlib import Path

import numpy as np
import yaml

from aespa_pl.curve_names import NOT_NEAREST
from aespa_pl.run.schema import FORMAT

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PHASES = ("statistics", "correction", "grid", "optq", "rounding", "polish", "tuning", "forward", "writing")


def simulate(
    folder: Path, blocks: int, *, finished: bool = True, extras: bool = True, bits: int = 2, seed: int = 0
) -> Path:
    """Write a run.

    Args:
        folder: Of the run.
        blocks: How many.
        finished: With metrics.json.
        extras: With what not every run stores: tuning, errors of outputs, memory by block, accuracies.
        bits: Bits of a weight.
        seed: Of the invented numbers.
    """
    numbers = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    losses = {
        (block, name): _losses(block, blocks, name, numbers)
        for block in range(blocks)
        for name in PROJECTIONS
    }
    journal = {
        "format": FORMAT,
        "fingerprint": {},
        "checkpoint": None,
        "portions": [],
        "damping": {},
        "model": {},
        "blocks": {
            str(block): _record(block, {name: losses[block, name] for name in PROJECTIONS}, numbers, extras)
            for block in range(blocks)
        },
    }
    (folder / "journal.json").write_text(json.dumps(journal))
    settings = {"quantization": {"method": "aespa", "bits": bits}}
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": {"pretrained": "simulated"}, **settings}))
    (folder / "model").mkdir()
    (folder / "model" / "quantization.json").write_text(json.dumps({"versions": {"aespa_pl": "simulated"}}))
    if finished:
        (folder / "metrics.json").write_text(json.dumps(_metrics(extras=extras)))
    return folder


def _losses(block: int, blocks: int, name: str, numbers: np.random.Generator) -> dict[str, float]:
    nearest = 10 * math.exp(numbers.normal())
    place = PROJECTIONS.index(name) / 20 + 0.3 * math.sin(3 * block / blocks) ** 2
    final = nearest * (0.3 + place + 0.04 * numbers.random())
    return {"nearest": nearest, "optq": 0.8 * nearest, "final": final, NOT_NEAREST: 0.2 * numbers.random()}


def _record(
    block: int, losses: dict[str, dict[str, float]], numbers: np.random.Generator, extras: bool
) -> dict[str, object]:
    seconds = {phase: (3 + i) * (1 + 0.2 * numbers.random()) for i, phase in enumerate(PHASES)}
    record: dict[str, object] = {"losses": losses, "seconds": seconds, "files": {}}
    if extras:
        error = 0.02 * (1 + block) ** 0.6 * (1 + 0.1 * numbers.random())
        record["output_error"] = {"rounded": 1.4 * error, "corrected": 1.1 * error, "tuned": error}
        start = 0.01 * (1 + block) * (1 + 0.1 * numbers.random())
        record["tuning"] = {
            "start_error": start, "error": 0.8 * start, "epoch": 3, "changed": 0.05, "finite": True,
        }  # fmt: skip
        record["peak_bytes"] = {"host": int(2**31 + 1e6 * block), "device": (2**32)}
    return record


def _metrics(*, extras: bool) -> dict[str, object]:
    texts = {"wikitext2": 1.0, "c4": 1.3, "ptb": 1.7}
    metrics: dict[str, object] = {
        "perplexity": {
            kind: {text: base * factor for text, factor in texts.items()}
            for kind, base in (("original", 20.0), ("nearest", 300.0), ("quantized", 27.0))
        },
        "seconds": {"quantization": 4000.0},
        "peak_bytes": {"host": 2**31, "device": 2**32},
    }
    if extras:
        tasks = ("arc_easy", "arc_challenge", "hellaswag", "piqa", "winogrande", "lambada_openai", "mmlu")
        metrics["tasks"] = {
            kind: {
                task: {"value": top - i / 30, "error": 0.012, "metric": "acc"} for i, task in enumerate(tasks)
            }
            for kind, top in (("original", 0.7), ("nearest", 0.4), ("quantized", 0.66))
        }
    return metrics
