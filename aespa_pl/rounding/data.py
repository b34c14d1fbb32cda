"""Deliver the statistics of a block by a LightningDataModule: every batch is the same set of tensors."""

from collections.abc import Iterator, Mapping

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

StatisticsBatch = Mapping[str, tuple[Tensor, Tensor | None]]
"""Statistics of each projection: damped Hessian ``[heads or 1, d_in, d_in]``, and G ``[heads, d_h, d_h]``
or None."""
EPOCH = 100
"""Iterations of what Lightning calls an epoch: EarlyStopping and others act at the end of each."""


def epochs_of(iterations: int) -> int:
    """Return the number of epochs that so many iterations make; the last may be shorter."""
    return -(-iterations // EPOCH)


class Repetition:
    """Stands for one epoch: the objective of all calibration tokens, once for each iteration.

    Lightning takes any iterable for a loader. This one tells it where inside an epoch it is, so that a
    training that continues there has its epochs end where they would have ended.
    """

    def __init__(self, batch: StatisticsBatch) -> None:
        """Repeat ``batch``, the tensors themselves and not copies."""
        self._batch = batch
        self._done = 0

    def __len__(self) -> int:
        """Return the iterations of an epoch."""
        return EPOCH

    def __iter__(self) -> Iterator[StatisticsBatch]:
        """Yield the batch for the rest of the epoch."""
        self._done %= EPOCH  # Lightning stops at the last batch, not after it
        while self._done < EPOCH:
            self._done += 1
            yield self._batch

    def state_dict(self) -> dict[str, int]:
        """Return the place inside the epoch."""
        return {"done": self._done}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at a place inside the epoch."""
        self._done = state["done"]


class StatisticsDataModule(LightningDataModule):
    """Delivers the precomputed statistics of one block, again and again.

    Nothing in a batch depends on the amount of calibration data, and each batch is all of it: there
    is no sampling noise in the gradients (Section 3.5 of the paper).
    """

    def __init__(self, batch: StatisticsBatch) -> None:
        """Take tensors, which stay on the device if they are there already."""
        super().__init__()
        self.batch = batch

    def train_dataloader(self) -> Repetition:
        """Return what Trainer.fit reads."""
        return Repetition(self.batch)

    def transfer_batch_to_device(
        self, batch: StatisticsBatch, device: torch.device, dataloader_idx: int
    ) -> StatisticsBatch:
        """Return the batch itself: the statistics are where the block was run, on the device."""
        return batch
