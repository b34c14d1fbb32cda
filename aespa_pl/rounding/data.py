"""The statistics of a block as a LightningDataModule: every batch is the same set of tensors."""

from collections.abc import Mapping

from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

StatisticsBatch = Mapping[str, tuple[Tensor, Tensor | None]]
"""By projection: damped Hessian ``[heads or 1, d_in, d_in]``, and G ``[heads, d_h, d_h]`` or None."""
EPOCH = 100
"""Iterations of what Lightning calls an epoch: EarlyStopping and others act at the end of each."""


class _Repeated(Dataset[StatisticsBatch]):
    """The objective of all calibration tokens, once for each iteration of an epoch."""

    def __init__(self, batch: StatisticsBatch) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, _: int) -> StatisticsBatch:
        return self.batch


class StatisticsDataModule(LightningDataModule):
    """Delivers the precomputed statistics of one block, again and again.

    Nothing in a batch depends on the amount of calibration data, and each batch is all of it: there
    is no sampling noise in the gradients (Section 3.5 of the paper).
    """

    def __init__(self, batch: StatisticsBatch) -> None:
        """Take tensors, which stay on the device if they are there already."""
        super().__init__()
        self.batch = batch

    def train_dataloader(self) -> DataLoader[StatisticsBatch]:
        """Return the loader that Trainer.fit reads."""
        return DataLoader(_Repeated(self.batch), batch_size=None, num_workers=0)
