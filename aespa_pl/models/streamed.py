"""Carry the hidden states of many segments through a model, one block at a time.

Only one block and one batch are on the device, and the stem (embedding, final norm, head) while it is
needed; the hidden states of all segments wait in host memory or on disk, in the type of the blocks.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from aespa_pl.models.family import Family
from aespa_pl.models.pretrained import PretrainedFolder
from aespa_pl.storage.batches import Batches, BatchesOnDisk

POSITIONS = 256
"""Positions whose logits are in memory at once; those of a segment may take more than a block."""


@dataclass(frozen=True)
class StreamedModel:
    """Reads each block of a model from its folder when it is needed, and runs hidden states through it."""

    pretrained: PretrainedFolder
    model: PreTrainedModel
    """The model on the meta device; its buffers and the block or stem in use are on ``device``."""
    device: torch.device
    dtype: torch.dtype
    hidden_folder: Path | None = None
    """Folder with the hidden states of all segments in files; None: they are in memory."""
    hidden_on_device: bool = False
    """Whether hidden states in memory are on the device, not in host memory."""

    @classmethod
    def open(
        cls,
        pretrained: PretrainedFolder,
        device: torch.device,
        dtype: torch.dtype,
        hidden_folder: Path | None = None,
        *,
        hidden_on_device: bool = False,
    ) -> "StreamedModel":
        """Make the skeleton; no weight is read."""
        model = pretrained.skeleton()
        pretrained.family.restore_buffers(model, device)
        return cls(pretrained, model, device, dtype, hidden_folder, hidden_on_device)

    @property
    def family(self) -> Family:
        """Return the adapter of the model's family."""
        return self.pretrained.family

    @property
    def block_count(self) -> int:
        """Return the number of Transformer blocks."""
        return int(self.pretrained.config.num_hidden_layers)

    @contextmanager
    def block(self, index: int, pretrained: PretrainedFolder | None = None) -> Iterator[nn.Module]:
        """Hold a block, of the model's own folder or another, in memory for the time of this context."""
        pretrained = pretrained or self.pretrained
        block = pretrained.load_block(self.model, index, self.device, self.dtype)
        try:
            yield block
        finally:
            pretrained.release_block(self.model, index)

    @contextmanager
    def stem(self) -> Iterator[None]:
        """Hold what lies outside the blocks in memory for the time of this context."""
        self.pretrained.load_stem(self.model, self.device, self.dtype)
        try:
            yield
        finally:
            self.pretrained.release_stem(self.model)

    def blocks(self) -> Iterator[nn.Module]:
        """Yield the blocks, first to last, each in memory only until the next is asked for."""
        for index in range(self.block_count):
            with self.block(index) as block:
                yield block

    def embed(self, tokens: Tensor, batch_size: int) -> Batches:
        """Load the stem, and return the tokens ``[segments, L]`` embedded, in batches ``[B, L, d]``."""
        with self.stem():
            return self.embed_with_stem(tokens, batch_size)

    @torch.inference_mode()
    def embed_with_stem(self, tokens: Tensor, batch_size: int) -> Batches:
        """Do what ``embed`` does inside of a ``stem`` context."""
        batches = (
            self.family.embed(self.model, ids.to(self.device))[0]
            for ids in tokens.split(batch_size)
            if len(ids)  # without segments one is empty
        )
        return self.keep(batches)

    def keep(self, batches: Iterable[Tensor]) -> Batches:
        """Return hidden states ``[B, L, d]`` where all segments' hidden states wait."""
        if self.hidden_on_device:
            return list(batches)
        on_host = (batch.cpu() for batch in batches)
        if self.hidden_folder is None:
            return list(on_host)
        return BatchesOnDisk(self.hidden_folder, on_host)

    def logits(self, hidden: Tensor) -> Iterator[Tensor]:
        """Yield logits ``[positions, V]`` in float32, of a few positions of a segment ``[L, d]`` at a time.

        It is called inside of a ``stem`` context.
        """
        for piece in hidden.split(POSITIONS):
            yield self.family.head(self.model, piece[None].to(self.device))[0].float()

    @torch.inference_mode()
    def run_block(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """Run one batch ``[B, L, d]`` through a block, on the device."""
        hidden = hidden.to(self.device)
        return self.family.run_block(block, hidden, self.family.arguments(self.model, hidden))

    def advance(self, block: nn.Module, batches: Batches) -> None:
        """Replace the hidden states of all batches by the block's output."""
        for i in range(len(batches)):
            hidden = batches[i]
            batches[i] = self.run_block(block, hidden).to(hidden.device)
