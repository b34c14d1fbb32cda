"""Keep tokens of texts, weights out of pickles, and perplexities from run to run.

Every entry is found by a checksum of all that it was made from, so an entry is never out of date,
and the folder may be removed at any time.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock
from safetensors import SafetensorError, safe_open
from torch import Tensor

from aespa_pl.errors import UserError
from aespa_pl.paths import expanded
from aespa_pl.storage.files import checksum_of, write_tensors

log = logging.getLogger(__name__)


def cache_folder(given: str | None = None) -> Path:
    """Return the folder that ``data.cache`` names; None: aespa_pl under $XDG_CACHE_HOME or ~/.cache."""
    if given:
        return expanded(given)
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # the XDG specification: a relative path is to be ignored
    return (base if base.is_absolute() else Path.home() / ".cache") / "aespa_pl"


def recalled(cache: Path, kind: str, made_from: Mapping[str, object]) -> Tensor | None:
    """Return the tensor that was kept of a kind, made from this (JSON); None if there is none, or damaged."""
    path, description = _entry(cache, kind, made_from)
    try:
        with safe_open(path, "pt") as file:
            stored = file.metadata() or {}
            tensor: Tensor = file.get_tensor(kind)
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError) as error:
        log.warning("making %s again: what the cache has in %s can't be read (%s)", kind, path, error)
        return None
    if stored != {"made_from": description, "sha256": checksum_of([tensor])}:
        log.warning("making %s again: what the cache has in %s is damaged", kind, path)
        return None
    return tensor


def keep(cache: Path, kind: str, made_from: Mapping[str, object], tensor: Tensor) -> None:
    """Write a tensor whole or not at all, so that it is recalled; a failure is logged and stops nothing."""
    path, description = _entry(cache, kind, made_from)
    try:
        with alone_in(path.parent):
            metadata = {"made_from": description, "sha256": checksum_of([tensor])}
            write_tensors(path, {kind: tensor}, metadata)
    except (OSError, UserError) as error:
        # write_tensors words its error for a run's own files; the system's reason is underneath
        reason = getattr(error.__cause__ or error, "strerror", None) or error.__cause__ or error
        advice = "set data.cache to a folder with space that can be written to"
        failed = "the %s will be made again next time: cannot write to %s (%s); %s"
        log.warning(failed, kind, path.parent, reason, advice)


def _entry(cache: Path, kind: str, made_from: Mapping[str, object]) -> tuple[Path, str]:
    """Return the file of an entry, and the one JSON text that equal descriptions share."""
    description = json.dumps(made_from, sort_keys=True)
    name = hashlib.sha256(description.encode()).hexdigest()
    return cache / kind / f"{name}.safetensors", description


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Let one process at a time write to a folder, which is made if need be; others wait here.

    The operating system frees the lock of a process that died. Raises OSError where it can't be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        yield
