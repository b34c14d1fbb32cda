"""The quantized model as a Hugging Face folder, written shard by shard while the walk goes on."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from aespa_pl.storage.files import disk_errors, write_json, write_tensors, write_whole


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
