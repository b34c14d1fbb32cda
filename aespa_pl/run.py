"""The folder of a run and its journal: what is complete, and what it was made from."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aespa_pl.artifacts import next_version, version_number, write_json
from aespa_pl.errors import UserError

FORMAT = 1
"""Version of the journal; a newer one is refused."""
MEBIBYTE = 2**20


@dataclass
class Run:
    """One run: its folder, the fingerprint of its inputs and the blocks that are complete."""

    folder: Path
    fingerprint: Mapping[str, Any]
    blocks: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By block index: checksums of its files and what was measured."""

    @property
    def journal(self) -> Path:
        """The file that names what is complete."""
        return self.folder / "journal.json"

    @property
    def model_folder(self) -> Path:
        """The quantized model."""
        return self.folder / "model"

    def block_file(self, index: int) -> Path:
        """Integers, scales, zero points and zeta of a block."""
        return self.folder / "blocks" / f"block_{index:03}.safetensors"

    @classmethod
    def create(cls, parent: Path, fingerprint: Mapping[str, Any]) -> "Run":
        """Make a new run in ``parent/version_N``; an old one is never touched."""
        run = cls(next_version(parent), fingerprint)
        run.save()
        return run

    @classmethod
    def open(cls, folder: Path) -> "Run":
        """Read a run.

        Raises:
            UserError: There is no journal, it is damaged, or a newer version wrote it.
        """
        path = folder / "journal.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] > FORMAT:
                raise UserError(
                    f"{path} was written by a newer version of aespa-pl: update aespa-pl"
                )
            blocks = {int(index): record for index, record in content["blocks"].items()}
            return cls(folder, content["fingerprint"], blocks)
        except OSError as error:
            raise UserError(
                f"{folder} is not the folder of a run: {path.name} cannot be read"
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is damaged ({error}): start a new run") from error

    def save(self) -> None:
        """Write the journal."""
        write_json(
            self.journal,
            {
                "format": FORMAT,
                "fingerprint": self.fingerprint,
                "blocks": {str(index): record for index, record in self.blocks.items()},
            },
        )


def last_run(parent: Path) -> Path:
    """Return the newest run in ``parent``.

    Raises:
        UserError: There is none.
    """
    runs = [path for path in parent.glob("version_*") if (path / "journal.json").is_file()]
    if not runs:
        raise UserError(
            f"no run in {parent}: check output.folder and output.name, or start with aespa-pl fit"
        )
    return max(runs, key=version_number)


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_fingerprint(files: Iterable[Path]) -> str:
    """Return a SHA-256 over names, sizes, and first and last MiB of the files of a checkpoint.

    Hashing 60 GB would take minutes; a checkpoint that was trained on differs in every tensor.
    """
    digest = hashlib.sha256()
    for path in sorted(files):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(MEBIBYTE))
            file.seek(max(0, size - MEBIBYTE))
            digest.update(file.read())
    return digest.hexdigest()
