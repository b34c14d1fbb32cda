"""Calls of ``aespa_pl.quantize`` as a user makes them, for tests and for processes that are interrupted."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import aespa_pl
from aespa_pl.data.texts import EMBEDDED

SEGMENTS, LENGTH, WORDS, ITERATIONS = 4, 32, 1024, 20


def tiny() -> LlamaForCausalLM:
    """Return a random model of two blocks."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=2, max_position_embeddings=LENGTH, vocab_size=WORDS,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def tokens(seed: int = 0) -> Tensor:
    """Return random token ids."""
    return torch.randint(WORDS, (SEGMENTS, LENGTH), generator=torch.Generator().manual_seed(seed))


def tokenizer() -> Any:
    """Return the tokenizer of the embedded model."""
    return AutoTokenizer.from_pretrained(EMBEDDED / "llama")


def call(folder: Path, model: PreTrainedModel | None = None, **more: Any) -> aespa_pl.QuantizedRun:
    """Quantize the model in memory, or another one, on tokens in memory."""
    given: dict[str, Any] = {
        "method": "aespa",
        "rounding": {"iterations": ITERATIONS},
        "calibration": tokens(),
        "evaluation": [],
        "data": {"cache": str(folder / "cache")},
        "output": {"folder": folder / "runs", "checkpoint_iterations": 10},
        "trainer": {"accelerator": "cpu"},
        "tokenizer": tokenizer(),
    }
    return aespa_pl.quantize(model or tiny(), **given | more)


def interrupted(arguments: Sequence[str]) -> None:
    """Quantize into a folder, in a process that is interrupted; say how it ended."""
    try:
        call(Path(arguments[0]))
    except KeyboardInterrupt as error:
        print(f"KeyboardInterrupt: {error}")  # noqa: T201


def blocks(run: Path) -> dict[str, bytes]:
    """Return the files with the integers of a run."""
    return {file.name: file.read_bytes() for file in sorted((run / "blocks").iterdir())}
