"""Measure a model that auto-round has quantized, on the tokens that ``benchmarks/accuracy.py`` takes.

It runs in an environment of its own, without aespa_pl:

    python -m venv peer
    peer/bin/pip install auto-round transformers safetensors jsonargparse docstring-parser
    peer/bin/python benchmarks/peer_auto_round.py MODEL EVAL.safetensors CALIBRATION.safetensors

The weights are asymmetric with one scale and one zero point for each row, as in our tables. Seconds
are processor seconds of the quantization, without the imports and the evaluation.
"""

import importlib
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from jsonargparse import auto_cli
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(
    model: str,
    evaluation: str | list[str],
    calibration: str,
    *,
    bits: int = 2,
    group_size: int = -1,
    iterations: int = 200,
    extension: bool = False,
    threads: int = 1,
    seed: int = 42,
    segments: int | None = None,
    blocks: int | None = None,
    output: str | None = None,
) -> None:
    """Quantize with auto-round's defaults and print perplexity and seconds.

    Args:
        model: Folder of the model.
        evaluation: File with ``ids``, the tokens of a held-out text; or a list of such files.
        calibration: File with ``ids`` ``[segments, L]``, the calibration segments.
        bits: Of each weight.
        group_size: Weights that share a scale; -1 is one scale for each row.
        iterations: Of each block; 200 is auto-round's default.
        extension: Switch on ``enable_alg_ext``, which auto-round offers for 2 bits.
        threads: Threads of torch.
        seed: Of auto-round.
        segments: Use only the first so many segments of the evaluation.
        blocks: Quantize only the first so many blocks; null: all.
        output: A JSON line is appended to this file.
    """
    auto_round = library("auto_round", "auto-round")
    torch.set_num_threads(threads)
    tokens = load_file(calibration)["ids"].long()
    count, length = tokens.shape
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    start = time.process_time()
    quantizer = auto_round.AutoRound(
        network,
        tokenizer=AutoTokenizer.from_pretrained(model),
        bits=bits,
        group_size=group_size,
        sym=False,
        iters=iterations,
        nsamples=count,
        seqlen=length,
        dataset=[segment[None] for segment in tokens],
        seed=seed,
        amp=False,
        device_map="cpu",
        **({"enable_alg_ext": True} if extension else {}),
        **({"to_quant_block_names": _first(blocks)} if blocks else {}),
    )
    quantized, _ = quantizer.quantize()
    seconds = time.process_time() - start
    files = [evaluation] if isinstance(evaluation, str) else evaluation
    found = perplexities(quantized, files, length, segments)
    row: dict[str, Any] = {
        "peer": f"auto-round {auto_round.__version__}",
        "model": Path(model).name,
        "calibration": Path(calibration).name,
        "bits": bits,
        "group_size": group_size,
        "iterations": iterations,
        "extension": extension,
        "blocks": blocks,
        "perplexity": found[Path(files[0]).stem] if len(files) == 1 else found,
        "processor_seconds": round(seconds, 1),
    }
    report(row, output)


def library(name: str, package: str) -> Any:
    """Import a peer, or end with what to do."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise SystemExit(
            f"{package} isn't installed here. Use an environment of its own: "
            f"pip install {package}, then run this file with that environment's Python."
        ) from None


def perplexities(
    model: torch.nn.Module, files: list[str], length: int, segments: int | None
) -> dict[str, float]:
    """Return the perplexity of each file's first segments, or of all."""
    found = {}
    for file in files:
        ids = load_file(file)["ids"].long()
        if len(ids) == 1:  # a whole text
            ids = ids.view(-1, length)
        found[Path(file).stem] = round(perplexity(model, ids[:segments]), 3)
    return found


def report(row: dict[str, Any], output: str | None) -> None:
    """Print a row as a JSON line, and append it to a file."""
    print(json.dumps(row))
    if output:
        with Path(output).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _first(blocks: int) -> str:
    """Return a pattern that finds the names of the first so many blocks."""
    return rf"\.({'|'.join(str(index) for index in range(blocks))})$"


@torch.no_grad()
def perplexity(model: torch.nn.Module, segments: Tensor) -> float:
    """Return exp of the mean negative log likelihood of positions 2 to L of each segment ``[n, L]``."""
    model.float().eval()
    total = 0.0
    for batch in segments.split(4):
        logits = model(input_ids=batch).logits[:, :-1].float()
        total += float(
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
        )
    return math.exp(total / (segments.shape[0] * (segments.shape[1] - 1)))


if __name__ == "__main__":
    auto_cli(main)
