"""Keep the journal of a run, which names what is complete and what it was made from."""

import hashlib
import logging
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aespa_pl.errors import UserError
from aespa_pl.run import schema
from aespa_pl.run.find import GIVE, JOURNAL
from aespa_pl.run.folder import RunFolder, Training, how_to_continue, next_version
from aespa_pl.storage.files import checksum, move_whole, write_json

log = logging.getLogger(__name__)

MEBIBYTE = 2**20
PLACES, PART = 1024, 2**12  # of a large file that tell it from another one, and the bytes of each
CHECKSUM = 64  # digits of a SHA-256, of which a message has the first


@dataclass
class Run(RunFolder):
    """Knows the folder of a run, the fingerprint of its inputs and what is complete.

    The journal is written after the files that it names, and each write replaces it whole. So
    what it names is on the disk, and what it does not name is not used.
    """

    fingerprint: dict[str, Any]
    blocks: dict[int, schema.BlockRecord] = field(default_factory=dict)  # that are complete, by number
    checkpoint: schema.LearnedFile | None = None  # Lightning's, of the portion that is being learned
    portions: list[schema.LearnedFile] = field(default_factory=list)  # of the block under way, learned before
    damping: dict[int, int | float] = field(default_factory=dict)  # of blocks whose first attempt diverged
    tuned: schema.TunedModelRecord | None = None  # end to end; a block's record says if its files have it
    stem: str = ""  # checksum of the numbers of embedding and head, once they are written
    model: dict[str, str] = field(default_factory=dict)  # checksums of what lies beside the blocks at the end
    writes: bool = True  # whether this process writes files; otherwise all notes stay in its memory

    @classmethod
    def create(cls, parent: Path, fingerprint: Mapping[str, Any]) -> "Run":
        """Make a new run in ``parent/version_N``; an old one is never touched."""
        run = cls(next_version(parent), dict(fingerprint))
        try:
            run.save()
        except UserError:  # without a journal it is no run
            shutil.rmtree(run.folder, ignore_errors=True)
            raise
        return run

    @classmethod
    def open(cls, folder: Path) -> "Run":
        """Read a run. Raises UserError where no journal is there, it is damaged, or of another version."""
        path = folder / JOURNAL
        try:
            return cls(folder, **_kept(schema.parse(schema.JournalContent, path)))
        except OSError as error:
            raise UserError(
                f"{folder} is not the folder of a run: {path.name} cannot be read; {GIVE}, or last"
            ) from error
        except (schema.DamagedFileError, ValueError) as error:
            raise UserError(
                f"{path} is damaged, or of another version of aespa-pl ({error}): start a new run"
            ) from error

    def save(self) -> None:
        """Write the journal."""
        if self.writes:
            content = schema.JournalContent(format=schema.FORMAT, **_kept(self))
            write_json(self.journal_file, content.model_dump(exclude_unset=True))

    def metrics(self) -> dict[str, Any] | None:
        """Return what was measured at the end; None where it is not there yet, or damaged."""
        try:
            return schema.parse(schema.Metrics, self.metrics_file).model_dump(exclude_unset=True)
        except (OSError, schema.DamagedFileError):
            return None

    def is_of(self, files: Collection[Path]) -> bool:
        """Tell whether these are the files of the model that was quantized."""
        return bool(self.fingerprint["model"] == model_fingerprint(files))

    def refuse_changes(self, fingerprint: Mapping[str, Any]) -> None:
        """Raise UserError with everything that the result depends on and that has changed."""
        if changes := differences(self.fingerprint, fingerprint):
            if any(c.startswith(("quantization.bits", "quantization.format")) for c in changes):
                changes = [c for c in changes if "_rate was " not in c]  # which follow from these
            do = "restore these, or start a new run without --ckpt_path"
            raise UserError(f"{self.folder} cannot be continued, because {'; '.join(changes)}: {do}")

    def move_blocks(self, place: str) -> None:
        """Have the blocks in another place in an end-to-end tuning, which then starts from its beginning."""
        with suppress(KeyError, TypeError):  # of a damaged journal, which is refused
            self.fingerprint["quantization"]["tuning"]["model"]["blocks"] = place

    def finish_block(self, index: int, known: Mapping[str, Any], files: Iterable[Path]) -> None:
        """Note that a block is complete, and which files hold it; the files of its learning are removed."""
        self.blocks[index] = schema.BlockRecord(**known, files=self.checksums(files))
        self.forget_learning()

    def finish_tuning(
        self, record: schema.TuningRecord, seconds: Mapping[str, float], moved: Iterable[Path] = ()
    ) -> None:
        """Note that the end-to-end tuning is done, its files on the disk, and its seconds by phase."""
        found = record.model_dump() | {"seconds": dict(seconds), "moved": self.checksums(moved)}
        file = self.tuned_file
        self.tuned = schema.TunedModelRecord(**found, file=self._name(file), checksum=checksum(file))
        self.forget_learning()

    def replace_block(self, index: int, files: Iterable[Path]) -> None:
        """Put the staged files of a block in the place of those that it has."""
        # the journal names them first, so that ``finish_replacing`` knows them after a kill in between
        new = {self._name(file): checksum(self.staged(file)) for file in files}
        self.add_to_block(index, {"files": new, "end_to_end": True})
        self.finish_replacing()

    def finish_replacing(self) -> None:
        """Put the staged files that the journal knows in their places, and remove the others."""
        known = {name: value for b in self.blocks.values() for name, value in b.files.items()}
        for file in sorted(path for path in self.staging_folder.rglob("*") if path.is_file()):
            name = file.relative_to(self.staging_folder).as_posix()
            if known.get(name) == checksum(file):
                move_whole(file, self.folder / name)
        shutil.rmtree(self.staging_folder, ignore_errors=True)

    def reopen(self, count: int) -> Iterator[str]:
        """Forget the blocks whose files are damaged, because they are quantized again; say so in lines."""
        self.finish_replacing()
        for file in self.damaged_files():  # beside the blocks, where all is written again
            file.unlink(missing_ok=True)
        self.model = {}  # of a finished run that is mended: the next write of the journal says so
        damaged = {i: files for i in sorted(self.blocks) if (files := self.damaged_files(i))}
        for index, files in damaged.items():
            names = ", ".join(map(str, files)) + " is damaged or missing"
            yield f"block {index} of {count}: {names}: the block is quantized again"
            del self.blocks[index]
        if self.tuned is not None and (damaged or not self.is_whole(self.tuned.file, self.tuned.checksum)):
            # the blocks that it has changed are no longer what a block was quantized after
            yield (
                "cannot resume the end-to-end tuning, because a file is damaged or missing: all blocks are "
                "quantized again"
            )
            self.blocks, self.tuned = {}, None
        if self.blocks:
            yield f"{len(self.blocks)} of {count} blocks are complete already"

    def damp_again(self, index: int, damping: float) -> None:
        """Note the damping of the second attempt at a block, and forget what the first one has learned."""
        self.damping[index] = damping
        self.forget_learning()

    def add_to_block(self, index: int, fields: Mapping[str, Any]) -> None:
        """Change fields of a complete block's record, whose values are known later than the block is."""
        self.blocks[index] = self.blocks[index].model_copy(update=fields)
        self.save()

    def finish_stem(self) -> None:
        """Note that the numbers of embedding and head are written."""
        self.stem = checksum(self.stem_file)
        self.save()

    @property
    def has_stem(self) -> bool:
        """Tell whether the numbers of embedding and head are there, and whole."""
        return self.is_whole(self._name(self.stem_file), self.stem)

    def finish_model(self) -> None:
        """Note that the model folder is complete: what lies there beside the blocks is whole."""
        of_blocks = {name for record in self.blocks.values() for name in record.files}
        paths = (*sorted(self.model_folder.rglob("*")), self.stem_file)
        self.model = self.checksums(p for p in paths if p.is_file() and self._name(p) not in of_blocks)
        self.save()

    def damaged_files(self, index: int | None = None) -> list[Path]:
        """Return which files of a block, or beside the blocks, are missing or not what the journal knows."""
        known = self.model if index is None else self.blocks[index].files
        return [self.folder / name for name, value in known.items() if not self.is_whole(name, value)]

    def damage(self) -> str:
        """Return in words which files of a finished run are missing or changed; empty where none is."""
        damaged = [file for index in (*sorted(self.blocks), None) for file in self.damaged_files(index)]
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        return f"missing or changed: {damaged[0].relative_to(self.folder)}{more}" if damaged else ""

    def refuse_damaged(self) -> None:
        """Raise UserError where a file of a finished run is missing or changed."""
        if damage := self.damage():
            raise UserError(
                f"the run {self.folder} is damaged ({damage}): mend it with {how_to_continue(self.folder)}"
            )

    def note_checkpoint(self, training: Training, file: Path, step: int = 0) -> None:
        """Note that Lightning's checkpoint of a portion, after so many optimizer steps, is on the disk."""
        self.checkpoint = self._learned(training, file, step)
        self.save()

    def checkpoint_to_continue(self, training: Training) -> Path | None:
        """Return the checkpoint of a training, if there is one; a damaged one is named and forgotten."""
        if self.checkpoint is None or not _is_about(self.checkpoint, training):
            return None
        if (file := self._intact(self.checkpoint, "it is not used")) is None:
            self.forget_checkpoint()
        return file

    def forget_checkpoint(self) -> None:
        """Remove the checkpoints, also what an interrupted removal has left."""
        self.checkpoint = None
        self.save()
        if self.writes:  # a ModelCheckpoint of the user's has its files beside them
            for folder in self.checkpoints_folder.glob("block_*"):
                shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):
                self.checkpoints_folder.rmdir()

    def note_portion(self, training: Training, file: Path) -> None:
        """Note that a portion of the block under way is learned."""
        self.portions.append(self._learned(training, file))
        self.forget_checkpoint()

    def portion_to_continue(self, training: Training) -> Path | None:
        """Return what a training has learned; where it isn't intact, it and all later ones are forgotten."""
        for known in self.portions[training.number : training.number + 1]:
            if _is_about(known, training) and (file := self._intact(known, "it is learned again")):
                return file
        del self.portions[training.number :]  # their files are overwritten, or go with the block
        return None

    def forget_learning(self) -> None:
        """Remove everything that the learning of the block under way has left."""
        self.portions.clear()
        self.forget_checkpoint()
        if self.writes:
            shutil.rmtree(self.portions_folder, ignore_errors=True)

    def _name(self, file: Path) -> str:
        return file.relative_to(self.folder).as_posix()

    def checksums(self, files: Iterable[Path]) -> dict[str, str]:
        """Return the checksums of files by their names in the run; nothing where this process writes none."""
        return {self._name(file): checksum(file) for file in files} if self.writes else {}

    def _learned(self, training: Training, file: Path, step: int = 0) -> schema.LearnedFile:
        block, key, name = training.block, training.key, self._name(file)
        return schema.LearnedFile(block=block, key=key, file=name, checksum=checksum(file), step=step)

    def is_whole(self, name: str, expected: str) -> bool:
        """Tell whether a file of the run is there, with the expected checksum."""
        file = self.folder / name
        return file.is_file() and checksum(file) == expected

    def _intact(self, record: schema.LearnedFile, then: str) -> Path | None:
        """Return the file of a record; where it is damaged, say what follows from that."""
        if self.is_whole(record.file, record.checksum):
            return self.folder / record.file
        log.warning("block %d: %s is damaged or missing: %s", record.block, self.folder / record.file, then)
        return None


def _is_about(record: schema.LearnedFile, training: Training) -> bool:
    return (record.block, record.key) == (training.block, training.key)


def _kept(journal: schema.JournalContent | Run) -> dict[str, Any]:
    """Return what the journal stores of a run, beside its own format."""
    return {key: getattr(journal, key) for key in schema.JournalContent.model_fields if key != "format"}


def model_fingerprint(files: Iterable[Path]) -> str:
    """Return a SHA-256 over names, sizes, ends (a MiB) and parts of a model's files, wherever they lie."""
    # hashing 60 GB would take minutes; weights out of a pickle are in the cache, which may be moved
    digest = hashlib.sha256()
    for path in sorted(files, key=lambda path: path.name):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(MEBIBYTE))
            for place in range(1, PLACES):
                file.seek(size * place // PLACES)
                digest.update(file.read(PART))
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
