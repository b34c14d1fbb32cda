"""Deliver the statistics of a block by a LightningDataModule: every batch is the same set of tensors."""

from collections.abc import Mapping

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


class Repetition(list[StatisticsBatch]):
    """Holds one epoch: the objective of all calibration tokens, once for each iteration.

    Lightning counts from where a checkpoint was in its epoch; it asks a loader for a state to trust it there.
    """

    def state_dict(self) -> dict[str, int]:
        """Return nothing: all items are the same."""
        return {}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Do nothing."""


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
        return Repetition([self.batch] * EPOCH)

    def transfer_batch_to_device(
        self, batch: StatisticsBatch, device: torch.device, dataloader_idx: int
    ) -> StatisticsBatch:
        """Return the batch itself: the statistics are where the block was run, on the device."""
        return batch
