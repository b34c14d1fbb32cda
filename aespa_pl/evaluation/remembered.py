"""Remember perplexities that don't change from run to run, beside the token cache.

Those of the original model and of round-to-nearest depend on nothing that a run decides, and measuring
them takes as long as measuring the quantized model.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import aespa_pl
from aespa_pl.data.token_cache import checksum
from aespa_pl.errors import UserError
from aespa_pl.storage.cache import alone_in, canonical_text, entry_name
from aespa_pl.storage.files import write_json


def measured_on(model: Mapping[str, object], tokens: Tensor) -> dict[str, object]:
    """Return all that a perplexity on token ids ``[segments, L]`` depends on, as JSON.

    ``model`` has the fingerprint of the weights, what is done to them (nothing, or rounding with which
    settings), and type and device that blocks run in.
    """
    return {
        **model,
        "tokens": checksum(tokens),
        "segments": list(tokens.shape),
        "versions": {
            "aespa_pl": aespa_pl.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def recall(cache: Path, described_by: Mapping[str, object]) -> float | None:
    """Return the perplexity that was measured before on what ``measured_on`` says, else None.

    Perplexities lie in the folder ``perplexities`` of the cache (``data.cache``).
    """
    try:
        content = json.loads(_file(cache, described_by).read_text(encoding="utf-8"))
        value = content["perplexity"]
        whole = content == _entry(described_by, value)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if not whole or not isinstance(value, float) or not math.isfinite(value):
        return None
    return value


def remember(cache: Path, described_by: Mapping[str, object], perplexity: float) -> None:
    """Keep a perplexity; a cache that can't be written to only means that it is measured again."""
    path = _file(cache, described_by)
    try:
        with alone_in(path.parent):
            write_json(path, _entry(described_by, perplexity))
    except (OSError, UserError):
        return


def _entry(described_by: Mapping[str, object], perplexity: float) -> dict[str, Any]:
    """Return the content of the file; by the checksum a number that somebody edited is measured again."""
    text = canonical_text({"measured_on": described_by, "perplexity": perplexity})
    return {**json.loads(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}


def _file(cache: Path, described_by: Mapping[str, object]) -> Path:
    return cache / "perplexities" / f"{entry_name(canonical_text(described_by))}.json"
