"""Run ``aespa-pl test --tasks`` on a model that is packed already, such as an export.

The blocks of such a model can't be streamed: transformers loads it whole, as an application would.
"""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from aespa_pl.commands.job import block_dtype
from aespa_pl.errors import UserError
from aespa_pl.evaluation.table import result_table
from aespa_pl.evaluation.tasks import find_tasks, measure_tasks
from aespa_pl.models.headers import shards
from aespa_pl.settings import ModelSettings, TaskSettings
from aespa_pl.storage.files import write_json, write_text


def quantized_folder(model: ModelSettings) -> Path | None:
    """Return the folder of a model whose weights are packed; None for any other model.

    Raises:
        UserError: They are packed for llama.cpp, which is not asked for accuracies.
    """
    folder = Path(model.pretrained).expanduser()
    if (folder / "model.gguf").is_file():
        raise UserError(
            f"model.pretrained: {folder} holds a model for llama.cpp; tasks run in transformers: test the "
            "run that it was exported from, or its export as compressed-tensors"
        )
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # whoever opens it as a model says what is wrong
    packed = isinstance(config, dict) and config.get("quantization_config")
    return folder if packed else None


def measure_exported(
    folder: Path, model: ModelSettings, tasks: TaskSettings, device: torch.device
) -> dict[str, Any]:
    """Return metrics as in ``test.json``, and write them with their table into the folder.

    Args:
        folder: Folder of the packed model, from :func:`quantized_folder`.
        model: Settings that say in which type it runs.
        tasks: Tasks and their limits.
        device: Device that the model runs on.

    Raises:
        UserError: No task is given, a task can't be had, or transformers can't load the model.
    """
    if not tasks.tasks:
        raise UserError(
            f"model.pretrained: the weights of {folder} are packed, so its blocks can't be streamed for a "
            "perplexity: give --tasks '[...]', or test the run that it was exported from"
        )
    found, start = find_tasks(tasks), time.perf_counter()
    dtype = block_dtype(model, device, torch.float16)
    scores = measure_tasks(folder, found, tasks, device=device, dtype=dtype)
    metrics = {
        "tasks": {"quantized": {name: asdict(score) for name, score in scores.items()}},
        "size": {"quantized": {"bytes": sum(path.stat().st_size for path in shards(folder))}},
        "test_seconds": {"quantized": time.perf_counter() - start},
    }
    write_json(folder / "test.json", metrics)
    write_text(folder / "test.md", result_table(metrics, folder.name).markdown())
    return metrics
