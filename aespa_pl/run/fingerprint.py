"""Identify by checksums what a run was made from, and list what differs between two descriptions."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

MEBIBYTE = 2**20
CHECKSUM = 64  # digits of a SHA-256, of which a message has the first


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_fingerprint(files: Iterable[Path]) -> str:
    """Return a SHA-256 over names, sizes, and first and last MiB of the files of a model.

    Hashing 60 GB would take minutes; a model that was trained further differs in every tensor. Where the
    files lie does not count: weights out of a pickle are in the cache, which may be moved.
    """
    digest = hashlib.sha256()
    for path in sorted(files, key=lambda path: path.name):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(MEBIBYTE))
            file.seek(max(0, size - MEBIBYTE))
            digest.update(file.read())
    return digest.hexdigest()


def differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return ``key was x and is y`` for each leaf of nested mappings that differs."""
    changes = []
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changes += differences(old, new, f"{prefix}{key}.")
        elif old != new:
            was, now_is = (f"{t[:8]}..." if len(t) == CHECKSUM else t for t in (str(old), str(new)))
            changes.append(f"{prefix}{key} was {was} and is {now_is}")
    return changes
