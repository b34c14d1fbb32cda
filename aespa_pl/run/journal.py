"""The folder of a run and its journal: what is complete, and what it was made from."""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from aespa_pl.errors import UserError
from aespa_pl.run.fingerprint import checksum, differences
from aespa_pl.run.versions import next_version
from aespa_pl.storage.files import write_json

FORMAT = 1
"""Version of the journal; a newer one is refused."""


@dataclass
class Run:
    """One run: its folder, the fingerprint of its inputs and what is complete.

    The journal is written after the files that it names, and each write replaces it whole: what it
    names is on the disk, and what it does not name is not used.
    """

    folder: Path
    fingerprint: Mapping[str, Any]
    blocks: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By block index: checksums of its files and what was measured."""
    checkpoint: dict[str, Any] | None = None
    """Lightning's checkpoint of the block under way: its ``block``, ``file`` and ``checksum``."""
    parts: list[dict[str, Any]] = field(default_factory=list)
    """Of the block under way, what has been learned already where it is learned in parts: ``block``,
    ``pieces``, ``file`` and ``checksum``."""
    pieces: list[str] = field(default_factory=list)
    """What is being learned; a checkpoint of anything else is of no use."""
    damping: dict[int, float] = field(default_factory=dict)
    """By block index: the damping of a second attempt, where the first one diverged."""
    writes: bool = True
    """Off in processes of the run that only look on: what they note stays in their memory."""

    @property
    def journal(self) -> Path:
        """The file that names what is complete."""
        return self.folder / "journal.json"

    @property
    def model_folder(self) -> Path:
        """The quantized model."""
        return self.folder / "model"

    @property
    def metrics_file(self) -> Path:
        """What was measured; written last, so a run that has it is finished."""
        return self.folder / "metrics.json"

    def block_file(self, index: int) -> Path:
        """Integers, scales, zero points and zeta of a block."""
        return self.folder / "blocks" / f"block_{index:03}.safetensors"

    def checkpoint_folder(self, index: int) -> Path:
        """Lightning's checkpoints of a block, while it is under way."""
        return self._checkpoints / f"block_{index:03}"

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
            return cls(
                folder,
                content["fingerprint"],
                {int(index): dict(record) for index, record in content["blocks"].items()},
                content["checkpoint"],
                list(content.get("parts", [])),
                damping={int(index): float(share) for index, share in content["damping"].items()},
            )
        except OSError as error:
            raise UserError(
                f"{folder} is not the folder of a run: {path.name} cannot be read; give the folder of a "
                "run (NAME/version_N), or last"
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is damaged ({error}): start a new run") from error

    def save(self) -> None:
        """Write the journal."""
        if not self.writes:
            return
        write_json(
            self.journal,
            {
                "format": FORMAT,
                "fingerprint": self.fingerprint,
                "blocks": {str(index): record for index, record in self.blocks.items()},
                "checkpoint": self.checkpoint,
                "parts": self.parts,
                "damping": {str(index): share for index, share in self.damping.items()},
            },
        )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes off this run; the operating system frees a dead process's lock.

        Raises:
            UserError: Another process has it.
        """
        lock = FileLock(self.folder / "lock")
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise UserError(
                f"{self.folder} is in use by another process: wait for it, or start a new run "
                "without --ckpt_path"
            ) from error
        try:
            yield
        finally:
            lock.release()

    def refuse_changes(self, fingerprint: Mapping[str, Any]) -> None:
        """Refuse to continue with other inputs.

        Raises:
            UserError: Something that the result depends on has changed; the message lists all of it.
        """
        changes = differences(self.fingerprint, fingerprint)
        if changes:
            raise UserError(
                f"{self.folder} cannot be continued, for {'; '.join(changes)}: restore these, or start "
                "a new run without --ckpt_path"
            )

    def finish_block(self, index: int, record: Mapping[str, Any], files: Iterable[Path]) -> None:
        """Note that a block is complete; its checkpoints are of no more use."""
        sums = {file.name: checksum(file) for file in files} if self.writes else {}
        self.blocks[index] = {**record, "files": sums}
        self.forget_learning()

    def damaged(self, index: int, files: Iterable[Path]) -> list[Path]:
        """Return the files of a complete block that are missing or not what the journal knows."""
        known = self.blocks[index]["files"]
        return [
            file for file in files if not file.is_file() or checksum(file) != known.get(file.name)
        ]

    def note_checkpoint(self, index: int, file: Path) -> None:
        """Note a checkpoint of the block under way that is on the disk."""
        self.checkpoint = {
            "block": index,
            "pieces": self.pieces,
            **self._described(file),
        }
        self.save()

    def usable_checkpoint(self, index: int) -> Path | None:
        """Return the checkpoint of a block's ``pieces``, if the journal has one.

        Raises:
            DamagedFileError: The file is missing or not what the journal knows.
        """
        if self.checkpoint is None or not self._fits(self.checkpoint, index):
            return None
        return self._intact(self.checkpoint)

    def forget_checkpoint(self) -> None:
        """Remove the checkpoints, also what a removal that was interrupted has left."""
        self.checkpoint = None
        self.save()
        if self.writes:
            shutil.rmtree(self._checkpoints, ignore_errors=True)

    def part_file(self, index: int, number: int) -> Path:
        """Integers that one part of a block's learning has found, until the block is complete."""
        return self._parts / f"block_{index:03}_{number:03}.safetensors"

    def note_part(self, index: int, file: Path) -> None:
        """Note that the ``pieces`` of the block under way have been learned."""
        self.parts.append({"block": index, "pieces": self.pieces, **self._described(file)})
        self.forget_checkpoint()

    def usable_part(self, index: int, number: int) -> Path | None:
        """Return what has been learned of a block's ``pieces``, if it has been.

        Raises:
            DamagedFileError: The file is missing or not what the journal knows.
        """
        if number >= len(self.parts) or not self._fits(self.parts[number], index):
            self.forget_parts(number)
            return None
        return self._intact(self.parts[number])

    def forget_parts(self, kept: int = 0) -> None:
        """Forget all but the first parts; their files are overwritten, or go with the block."""
        del self.parts[kept:]

    def forget_learning(self) -> None:
        """Remove all that the learning of the block under way has left."""
        self.forget_parts()
        self.forget_checkpoint()
        if self.writes:
            shutil.rmtree(self._parts, ignore_errors=True)

    def _described(self, file: Path) -> dict[str, str]:
        name = file.relative_to(self.folder).as_posix()
        return {"file": name, "checksum": checksum(file)}

    def _fits(self, record: Mapping[str, Any], index: int) -> bool:
        """Return whether a record is about the ``pieces`` of a block."""
        return (record["block"], record.get("pieces", [])) == (index, self.pieces)

    def _intact(self, record: Mapping[str, Any]) -> Path:
        file = self.folder / str(record["file"])
        if not file.is_file() or checksum(file) != record["checksum"]:
            raise DamagedFileError(str(file))
        return file

    @property
    def _checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def _parts(self) -> Path:
        return self.folder / "parts"


class DamagedFileError(Exception):
    """A file is not what the journal says of it."""
