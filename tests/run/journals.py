"""The tests of the journal note the same small files in it."""

import hashlib
from pathlib import Path

from aespa_pl.run.folder import Training
from aespa_pl.run.journal import Run

FINGERPRINT = {"model": "a" * 64, "dtype": "float32", "quantization": {"bits": 2, "grid": {"z": 1}}}


RECORD = {"losses": {"q": {"final": 1.5, "polish_passes": 2}}, "seconds": {"grid": 3}}


def portion_of(index: int, number: int = 0) -> Training:
    """Return the training of a portion of a block; those with other numbers have other heads."""
    return Training(index, f"q_heads_{number}, k", f"block_{index:03}", number)


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def note_checkpoint(run: Run, index: int, name: str = "a.ckpt") -> Path:
    """Write a checkpoint of a block, and note it."""
    file = make_file(run.checkpoint_folder(index) / name)
    run.note_checkpoint(portion_of(index), file)
    return file


def make_file(path: Path, content: str = "content") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path
