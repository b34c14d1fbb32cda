"""Token ids on the disk, found by everything that they were made from."""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

log = logging.getLogger(__name__)

VERSION = 1
"""Raised when the same settings would give other tokens than before."""


def default_cache() -> Path:
    """Return the folder for tokenized text: aespa_pl/tokens under $XDG_CACHE_HOME or ~/.cache."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # the XDG specification: a relative path is to be ignored
    return (given if given.is_absolute() else Path.home() / ".cache") / "aespa_pl" / "tokens"


def cached_tokens(
    folder: Path, made_from: Mapping[str, object], make: Callable[[], Tensor]
) -> Tensor:
    """Return the tokens made from ``made_from``, from the disk if they are there.

    The cache only saves time: trouble with it is logged and stops nothing.

    Args:
        folder: Of the cache.
        made_from: All that the tokens depend on, as JSON.
        make: Makes the tokens, if they are not there or damaged.
    """
    description = json.dumps({"version": VERSION, **made_from}, sort_keys=True)
    name = hashlib.sha256(description.encode()).hexdigest()
    path = folder / f"{name}.safetensors"
    tokens = _read(path, description)
    if tokens is None:
        tokens = make()
        _write(path, tokens, description)
    return tokens


def _read(path: Path, description: str) -> Tensor | None:
    """Return the tokens in a file, None if it is not there or not as it was written."""
    try:
        with safe_open(path, "pt") as file:
            found = file.metadata() or {}
            tokens: Tensor = file.get_tensor("tokens")
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError) as error:
        log.warning("tokenizing again: the cached tokens %s can't be read (%s)", path, error)
        return None
    if found != {"made_from": description, "sha256": _checksum(tokens)}:
        log.warning("tokenizing again: the cached tokens %s are damaged", path)
        return None
    return tokens


def _write(path: Path, tokens: Tensor, description: str) -> None:
    """Write the tokens whole or not at all; a failure is logged."""
    content = save({"tokens": tokens}, {"made_from": description, "sha256": _checksum(tokens)})
    # a name of its own: several processes of a run may write the same file at once
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        log.warning(
            "the tokens will be made again next time: cannot write to %s (%s); set data.cache to "
            "a folder with space that can be written to",
            path.parent,
            error.strerror or error,
        )
        if temporary.parent.is_dir():
            temporary.unlink(missing_ok=True)


def _checksum(tokens: Tensor) -> str:
    return hashlib.sha256(tokens.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
