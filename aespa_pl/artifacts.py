"""What a run leaves on disk: every file is written whole or not at all.

A file is written under a temporary name in its folder, flushed to the disk and renamed; so a file
that is there is complete.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from aespa_pl.errors import UserError


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn a full disk or a missing permission into a UserError that names the folder."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write to {folder}: {error.strerror or error}. Free space there, correct its "
            "permissions, or choose another folder with --output.folder"
        ) from error
    except Exception as error:
        # safetensors reports a failed write as an exception of its own, with the system's words
        if type(error).__name__ != "SafetensorError":
            raise
        raise UserError(
            f"cannot write to {folder}: {error}. Free space there, correct its permissions, or "
            "choose another folder with --output.folder"
        ) from error


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` make a file under a temporary name, and rename it to ``path`` once it is on disk.

    Raises:
        UserError: The disk is full or the folder not writable; nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with disk_errors(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            write(temporary)
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
            _flush_folder(path.parent)
    finally:
        with suppress(OSError):  # the error that brought us here is the one to report
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    write_whole(path, write)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write readable JSON, whole or not at all."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file.

    Raises:
        UserError: It can't be read.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): remove it") from error
    return content


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, whole or not at all."""
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_whole(path, lambda temporary: save_file(stored, temporary, dict(metadata)))


def next_version(folder: Path) -> Path:
    """Make and return ``folder/version_N`` for the smallest N above all that exist.

    Raises:
        UserError: The folder cannot be written to.
    """
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        taken = [version_number(path) for path in folder.glob("version_*")]
        while True:
            path = folder / f"version_{max(taken, default=-1) + 1}"
            try:
                path.mkdir()
            except FileExistsError:  # another process was faster
                taken.append(version_number(path))
                continue
            return path


def version_number(path: Path) -> int:
    """Return N of a folder named version_N, -1 for any other name."""
    number = path.name.removeprefix("version_")
    return int(number) if number.isdecimal() else -1


@dataclass(frozen=True)
class ModelWriter:
    """Writes a Hugging Face folder shard by shard: one for what lies outside the blocks, one a block."""

    folder: Path
    blocks: int

    def write_stem(self, tensors: Mapping[str, Tensor]) -> None:
        """Write what lies outside the blocks."""
        self._write_shard(0, tensors)

    def write_block(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors of one block under their names in the model."""
        self._write_shard(index + 1, tensors)

    def block_file(self, index: int) -> Path:
        """Return the shard of a block."""
        return self._shard(index + 1)

    def finish(
        self,
        names: Mapping[int, tuple[str, ...]],
        config: PreTrainedConfig,
        tokenizer: PreTrainedTokenizerBase,
        origin: Path,
    ) -> None:
        """Write what makes the shards a model.

        Args:
            names: Names of the tensors in shard 0 (outside the blocks), 1, 2 ...
            config: Of the original model.
            tokenizer: Of the original model.
            origin: Folder of the original; its generation_config.json is taken along.
        """
        with disk_errors(self.folder):
            # a process that was killed here has left it, perhaps with the libraries' own partial files
            shutil.rmtree(self._unfinished, ignore_errors=True)
            try:
                config.save_pretrained(self._unfinished)
                tokenizer.save_pretrained(self._unfinished)
                generation = origin / "generation_config.json"
                if generation.is_file():
                    shutil.copy(generation, self._unfinished)
                for file in sorted(path for path in self._unfinished.rglob("*") if path.is_file()):
                    target = self.folder / file.relative_to(self._unfinished)
                    write_whole(target, partial(shutil.copyfile, file))
            finally:
                shutil.rmtree(self._unfinished, ignore_errors=True)
        size = sum(self._shard(i).stat().st_size for i in names)
        where = {name: self._shard(i).name for i, shard in names.items() for name in shard}
        write_json(
            self.folder / "model.safetensors.index.json",
            {"metadata": {"total_size": size}, "weight_map": where},
        )

    @property
    def _unfinished(self) -> Path:
        return self.folder / ".partial"

    def _shard(self, number: int) -> Path:
        return self.folder / f"model-{number + 1:05}-of-{self.blocks + 1:05}.safetensors"

    def _write_shard(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        write_tensors(self._shard(number), tensors, {"format": "pt"})


def _flush_folder(folder: Path) -> None:
    """Make a rename durable; a file system that can't do it is no reason to stop."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)
