"""Write every file of a run whole or not at all.

A file is written under a temporary name in its folder, flushed to the disk and renamed; so a file
that is there is complete.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from aespa_pl.errors import UserError

MEND = "free space there, or correct its permissions"


@contextmanager
def disk_errors(folder: Path, advice: str = MEND) -> Iterator[None]:
    """Turn a full disk or a missing permission into a UserError that names the folder and what to do."""
    try:
        yield
    except (OSError, SafetensorError) as error:  # safetensors' has the system's words
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot write to {folder}: {reason}: {advice}") from error


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksum_of(tensors: Iterable[Tensor]) -> str:
    """Return the SHA-256 of the bytes of some tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def existing(folder: Path) -> Path:
    """Return the folder, or the first above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` make a file under a temporary name, and rename it to ``path`` once it is on disk.

    Raises UserError where the disk is full or the folder not writable; nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with disk_errors(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            write(temporary)
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            mask = os.umask(0)  # there is no way to read it but to set it
            os.umask(mask)
            temporary.chmod(0o666 & ~mask)  # safetensors makes files that only their owner reads
            temporary.replace(path)
            _flush_folder(path.parent)
    finally:
        with suppress(OSError):  # the error that brought us here is the one to report
            temporary.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove the unfinished files of a killed process, our own and safetensors' (.tmpXXXXXX)."""
    for pattern in (".tmp*", ".*.partial"):
        for file in folder.glob(pattern):
            with suppress(OSError):
                file.unlink()


def move_whole(source: Path, target: Path) -> None:
    """Put a file that is on the disk in the place of another."""
    with disk_errors(target.parent):
        source.replace(target)
        _flush_folder(target.parent)


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write readable JSON, whole or not at all."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of keys. Raises UserError where it can't be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}): remove it") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged, because it has no keys: remove it")
    return content


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, whole or not at all."""
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # of no tensors and an empty mapping safetensors writes a file that it can't read
    write_whole(path, lambda temporary: save_file(stored, temporary, dict(metadata) or None))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file into memory, by name; the library's are views of the file."""
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def has_tensors(path: Path) -> bool:
    """Tell whether a safetensors file is there, and as long as its header says."""
    try:
        with safe_open(path, "pt"):
            return True
    except (OSError, SafetensorError):
        return False


def _flush_folder(folder: Path) -> None:
    """Make a rename durable; a file system that can't do it is no reason to stop."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)
