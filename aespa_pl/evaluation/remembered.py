"""Remember perplexities that don't change from run to run, beside the token cache.

Those of the original model and of round-to-nearest depend on nothing that a run decides, and measuring
them takes as long as measuring the quantized model.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
import transformers
from torch import Tensor

import aespa_pl
from aespa_pl.storage.cache import checksum, keep, recalled

KIND = "perplexities"


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
    """Return the perplexity that was measured before on what ``measured_on`` says, else None."""
    perplexity = recalled(cache, KIND, described_by)
    return None if perplexity is None else float(perplexity)


def remember(cache: Path, described_by: Mapping[str, object], perplexity: float) -> None:
    """Keep a perplexity in the cache (``data.cache``)."""
    keep(cache, KIND, described_by, torch.tensor([perplexity], dtype=torch.float64))
