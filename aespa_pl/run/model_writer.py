"""Write the quantized model as a Hugging Face folder, shard by shard while the walk goes on."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from aespa_pl.models.hub import COMPANIONS
from aespa_pl.storage.files import read_json, write_json, write_tensors, write_whole


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

    @property
    def stem_file(self) -> Path:
        """Return the shard of what lies outside the blocks."""
        return self._shard(0)

    def block_file(self, index: int) -> Path:
        """Return the shard of a block."""
        return self._shard(index + 1)

    def finish(
        self, names: Mapping[int, tuple[str, ...]], origin: Path, config: Mapping[str, Any] | None = None
    ) -> None:
        """Write the index of the shards, and the files beside the weights that belong to the model.

        They are copied byte for byte: a copy that a library writes says the same in the words of its own
        version, which engines with another version misread. ``names`` are those of the tensors in shard 0
        (outside the blocks), 1, 2 ...; ``config`` has keys that config.json gets in addition.
        """
        copy_companions(origin, self.folder)
        if config:
            write_json(self.folder / "config.json", {**read_json(origin / "config.json"), **config})
        size = sum(self._shard(i).stat().st_size for i in names)
        where = {name: self._shard(i).name for i, shard in names.items() for name in shard}
        write_json(
            self.folder / "model.safetensors.index.json",
            {"metadata": {"total_size": size}, "weight_map": where},
        )

    def _shard(self, number: int) -> Path:
        return self.folder / f"model-{number + 1:05}-of-{self.blocks + 1:05}.safetensors"

    def _write_shard(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        write_tensors(self._shard(number), tensors, {"format": "pt"})


def copy_companions(origin: Path, folder: Path, patterns: tuple[str, ...] = COMPANIONS) -> None:
    """Copy the files that belong to a model, other than its weights, byte for byte."""
    for file in sorted({file for pattern in patterns for file in origin.glob(pattern)}):
        if file.is_file():
            write_whole(folder / file.relative_to(origin), partial(shutil.copyfile, file))
