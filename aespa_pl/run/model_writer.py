"""Write the quantized model as a Hugging Face folder, block by block while the walk goes on."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from aespa_pl.models.headers import read_header
from aespa_pl.models.hub import CODE, COMPANIONS
from aespa_pl.storage.files import write_json, write_tensors, write_whole


@dataclass(frozen=True)
class ModelWriter:
    """Writes a Hugging Face folder file by file: what lies outside the blocks, and each block."""

    folder: Path
    blocks: int

    def write_stem(self, tensors: Mapping[str, Tensor]) -> None:
        """Write what lies outside the blocks."""
        self.write_block(-1, tensors)

    def write_block(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors of one block under their names in the model."""
        write_tensors(self.block_file(index), tensors, {"format": "pt"})

    @property
    def stem_file(self) -> Path:
        """Return the file of what lies outside the blocks."""
        return self.block_file(-1)

    def block_file(self, index: int) -> Path:
        """Return the file of a block."""
        return self.folder / f"model-{index + 2:05}-of-{self.blocks + 1:05}.safetensors"

    def finish(self, origin: Path, own: Mapping[str, Mapping[str, Any]]) -> None:
        """Write the index of the files, and the files beside the weights that belong to the model.

        They are copied byte for byte: engines misread what a library of another version writes of them.
        ``own`` has the content of JSON files, by name, where it isn't that of ``origin``.
        """
        copy_companions(origin, self.folder)
        for name, content in own.items():
            write_json(self.folder / name, content)
        files = [self.block_file(index) for index in range(-1, self.blocks)]
        size = sum(file.stat().st_size for file in files)
        where = {name: file.name for file in files for name in read_header(file)}
        contents = {"metadata": {"total_size": size}, "weight_map": where}
        write_json(self.folder / "model.safetensors.index.json", contents)


def copy_companions(origin: Path, folder: Path, patterns: tuple[str, ...] = COMPANIONS) -> None:
    """Copy the files that belong to a model, other than its weights, byte for byte."""
    for file in companions(origin, patterns):
        content = file.read_bytes()  # not in what writes, which would name the wrong folder
        write_whole(folder / file.relative_to(origin), partial(Path.write_bytes, data=content))


def companions(origin: Path, patterns: tuple[str, ...] = COMPANIONS) -> list[Path]:
    """Return the files that belong to a model, other than its weights and code."""
    found = sorted({file for pattern in patterns for file in origin.glob(pattern)})
    return [file for file in found if file.is_file() and not file.match(CODE)]
