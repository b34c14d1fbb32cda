"""Keep tokens of texts, weights out of pickles, and perplexities from run to run.

Every entry is found by a checksum of all that it was made from, so an entry is never out of date,
and the folder may be removed at any time.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock


def cache_folder(given: str | None) -> Path:
    """Return the folder of the cache that ``data.cache`` names; None: the default one."""
    return Path(given).expanduser() if given else default_cache()


def default_cache() -> Path:
    """Return the folder of the cache where none is named: aespa_pl under $XDG_CACHE_HOME or ~/.cache."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # the XDG specification: a relative path is to be ignored
    return (given if given.is_absolute() else Path.home() / ".cache") / "aespa_pl"


def canonical_text(made_from: Mapping[str, object]) -> str:
    """Return the one JSON text that equal descriptions of an entry share."""
    return json.dumps(made_from, sort_keys=True)


def entry_name(description: str) -> str:
    """Return the name of an entry, without suffix: the SHA-256 of its description."""
    return hashlib.sha256(description.encode()).hexdigest()


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Let one process at a time write to a folder, which is made if need be; others wait here.

    The operating system frees the lock of a process that died. Raises OSError where it can't be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        yield
