"""Write the quantized model as a Hugging Face folder, block by block while the walk goes on."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from aespa_pl.models.headers import read_header
from aespa_pl.models.hub import CODE, COMPANIONS
from aespa_pl.storage.files import read_json, write_json, write_tensors, write_whole

LARGEST = 5_000_000_000  # bytes of a shard's tensors, unless it has only one


@dataclass(frozen=True)
class ModelWriter:
    """Writes a Hugging Face folder part by part: what lies outside the blocks, and each block.

    A part is one shard, or several where it has more than ``LARGEST`` bytes. The first has the part's number,
    as if there were no others: ``model-00003-of-00061``; then come ``model-00003-2-of-00061`` and so on.
    """

    folder: Path
    blocks: int

    def write_stem(self, tensors: Mapping[str, Tensor]) -> None:
        """Write what lies outside the blocks."""
        self.write_block(-1, tensors)

    def write_block(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors of one block under their names in the model."""
        shards, size = [dict[str, Tensor]()], 0
        for name in sorted(tensors):  # so that a block that is written again is divided in the same way
            size += tensors[name].nbytes
            if size > LARGEST and shards[-1]:
                shards.append({})
                size = tensors[name].nbytes
            shards[-1][name] = tensors[name]
        for place, shard in enumerate(shards, 1):
            write_tensors(self._shard(index, place), shard, {"format": "pt"})

    @property
    def stem_files(self) -> list[Path]:
        """Return the shards of what lies outside the blocks."""
        return self.block_files(-1)

    def block_files(self, index: int) -> list[Path]:
        """Return the shards of a block."""
        return [self._shard(index, 1), *sorted(self.folder.glob(self._shard(index, "*").name))]

    def finish(self, origin: Path, config: Mapping[str, Any] | None = None) -> None:
        """Write the index of the shards, and the files beside the weights that belong to the model.

        They are copied byte for byte: engines misread what a library of another version writes of them.
        ``config`` has keys that config.json gets in addition.
        """
        copy_companions(origin, self.folder)
        if config:
            write_json(self.folder / "config.json", {**read_json(origin / "config.json"), **config})
        files = [file for index in range(-1, self.blocks) for file in self.block_files(index)]
        size = sum(file.stat().st_size for file in files)
        where = {name: file.name for file in files for name in read_header(file)}
        contents = {"metadata": {"total_size": size}, "weight_map": where}
        write_json(self.folder / "model.safetensors.index.json", contents)

    def _shard(self, index: int, place: int | str) -> Path:
        further = "" if place == 1 else f"-{place}"
        return self.folder / f"model-{index + 2:05}{further}-of-{self.blocks + 1:05}.safetensors"


def copy_companions(origin: Path, folder: Path, patterns: tuple[str, ...] = COMPANIONS) -> None:
    """Copy the files that belong to a model, other than its weights, byte for byte."""
    for file in companions(origin, patterns):
        content = file.read_bytes()  # not in what writes, which would name the wrong folder
        write_whole(folder / file.relative_to(origin), partial(Path.write_bytes, data=content))


def companions(origin: Path, patterns: tuple[str, ...] = COMPANIONS) -> list[Path]:
    """Return the files that belong to a model, other than its weights and code."""
    found = sorted({file for pattern in patterns for file in origin.glob(pattern)})
    return [file for file in found if file.is_file() and not file.match(CODE)]
