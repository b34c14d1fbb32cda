"""Keep token ids on the disk, where they are found by everything that they were made from."""

import hashlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from aespa_pl.errors import UserError
from aespa_pl.storage.cache import alone_in, canonical_text, entry_name
from aespa_pl.storage.files import write_tensors

log = logging.getLogger(__name__)

VERSION = 2
"""Number of the way in which tokens are made; a change of it makes older entries invisible."""


def cached_tokens(
    cache: Path, made_from: Mapping[str, object], make: Callable[[], Tensor]
) -> Tensor:
    """Return the tokens made from ``made_from`` (JSON), from the disk if they are there whole.

    They lie in the folder ``tokens`` of the cache (``data.cache``). The cache only saves time: trouble with
    it is logged and stops nothing.
    """
    description = canonical_text({"version": VERSION, **made_from})
    path = cache / "tokens" / f"{entry_name(description)}.safetensors"
    tokens = _read(path, description)
    if tokens is None:
        tokens = make()
        _write(path, tokens, description)
    return tokens


def _read(path: Path, description: str) -> Tensor | None:
    """Return the tokens in a file, None if it is not there or not as it was written."""
    try:
        with safe_open(path, "pt") as file:
            stored = file.metadata() or {}
            tokens: Tensor = file.get_tensor("tokens")
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError) as error:
        log.warning("tokenizing again: the cached tokens %s can't be read (%s)", path, error)
        return None
    if stored != {"made_from": description, "sha256": checksum(tokens)}:
        log.warning("tokenizing again: the cached tokens %s are damaged", path)
        return None
    return tokens


def _write(path: Path, tokens: Tensor, description: str) -> None:
    """Write the tokens whole or not at all; a failure is logged."""
    try:
        with alone_in(path.parent):
            write_tensors(
                path,
                {"tokens": tokens},
                {"made_from": description, "sha256": checksum(tokens)},
            )
    except (OSError, UserError) as error:
        # write_tensors words its error for a run's own files; the system's reason is underneath
        reason = error.__cause__ or error
        log.warning(
            "the tokens will be made again next time: cannot write to %s (%s); set data.cache to "
            "a folder with space that can be written to",
            path.parent,
            getattr(reason, "strerror", None) or reason,
        )


def checksum(tokens: Tensor) -> str:
    """Return the SHA-256 of token ids."""
    return hashlib.sha256(tokens.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
