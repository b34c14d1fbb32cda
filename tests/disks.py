"""Make disks refuse or lose bits, and check what the user reads about it."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any, NoReturn

import pytest

from aespa_pl.errors import UserError


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def flip(path: Path) -> None:
    """Change the last bit, which leaves the shapes right."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    """Leave the first half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def leave_free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Have every disk say that so many bytes are free."""
    usage = shutil.disk_usage(".")._replace(free=size)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)


def full(*_: object, **__: object) -> NoReturn:
    """Do what a function of the system does where the disk is full."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def refused(folder: Path, reason: str = "No space left on device") -> Any:
    """Expect a UserError that says what is wrong, where, and what to do."""
    return pytest.raises(UserError, match=rf"^cannot write to {folder}: .*{reason}.*: free space .*$")
