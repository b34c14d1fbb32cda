"""Quantize language models to few bits with aespa, as a PyTorch Lightning application.

>>> import aespa_pl
>>> run = aespa_pl.quantize("HuggingFaceTB/SmolLM2-135M", bits=3, group_size=64, calibration="c4")
>>> run.export("gguf", "out")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aespa_pl.api import QuantizedRun, quantize, resume
    from aespa_pl.errors import UserError

__all__ = ["QuantizedRun", "UserError", "quantize", "resume"]

# A run is continued, and a perplexity remembered, by the same version alone: it rises where results change.
__version__ = "0.21.0"


def __getattr__(name: str) -> Any:
    """Import what the package offers when it is asked for: torch takes seconds."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'errors' if name == 'UserError' else 'api'}"), name)
