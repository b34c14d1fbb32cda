"""Run ``aespa-pl test`` on a quantized model alone: an export, a run's model folder, or any packed model.

The blocks of such a model can't be streamed: transformers loads it whole, as an application would.
"""

import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from aespa_pl.commands.job import block_dtype, held_out_texts
from aespa_pl.commands.limits import check_length, evaluation_length
from aespa_pl.commands.output import store
from aespa_pl.errors import UserError
from aespa_pl.evaluation.perplexity import refuse_diverged, whole_perplexity
from aespa_pl.evaluation.tasks import find_tasks, load_whole, measure_tasks, unpacked_config
from aespa_pl.models import family_of
from aespa_pl.models.headers import shards
from aespa_pl.run.schema import DESCRIPTION
from aespa_pl.settings import DataSettings, ModelSettings, TaskSettings


def quantized_folder(model: ModelSettings) -> Path | None:
    """Return the folder of a model that is quantized already, for transformers; None for any other."""
    folder = Path(model.pretrained).expanduser()
    if (folder / "model.gguf").is_file():
        raise UserError(
            f"model.pretrained: {folder} holds a model for llama.cpp, but test runs in transformers: test "
            "the run that it was exported from, or its export as compressed-tensors"
        )
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # whoever opens it as a model says what is wrong
    packed = config.get("quantization_config") if isinstance(config, dict) else None
    if packed is None:
        return folder if (folder / DESCRIPTION).is_file() else None
    method = packed.get("quant_method") if isinstance(packed, dict) else None
    if str(method) not in {*AUTO_QUANTIZATION_CONFIG_MAPPING, "bitsandbytes"}:
        raise UserError(
            f"model.pretrained: quantization_config in {folder / 'config.json'} has no quant_method that "
            f"transformers knows (it has {method}): copy config.json from the model's origin, or export the "
            "run again"
        )
    return folder


def measure_exported(
    folder: Path, model: ModelSettings, data: DataSettings, tasks: TaskSettings, device: torch.device
) -> dict[str, Any]:
    """Return metrics as in ``test.json``, and write them with their table into the folder."""
    if not tasks.tasks and not data.evaluation.names:
        raise UserError("data.evaluation.texts is empty: name at least one text, or tasks with --tasks")
    if tasks.kld:
        raise UserError(
            f"--kld: {folder} has no original to compare with: test the run that it was exported from"
        )
    chosen, start = find_tasks(tasks) if tasks.tasks else None, time.perf_counter()
    config = unpacked_config(folder)
    positions = family_of(config).positions(config)
    length = evaluation_length(data, positions)
    check_length("evaluation", length, positions, str(folder))
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    texts = held_out_texts(data, tokenizer, length, config.vocab_size)
    dtype = block_dtype(model, device, torch.float16)
    metrics: dict[str, Any] = {
        "size": {"quantized": {"bytes": sum(path.stat().st_size for path in shards(folder))}}
    }
    if texts:
        whole = load_whole(folder, device, dtype)
        measured = {name: whole_perplexity(whole, tokens) for name, tokens in texts.items()}
        refuse_diverged(measured, str(folder), dtype, "export a run with more bits")
        metrics["perplexity"] = {"quantized": measured}
        del whole  # the harness loads its own
    if chosen is not None:
        scores = measure_tasks(folder, chosen, tasks, device=device, dtype=dtype)
        metrics["tasks"] = {"quantized": scores}
        metrics["test_seconds"] = {"quantized": time.perf_counter() - start}
    store(folder, metrics, folder.name)
    return metrics
