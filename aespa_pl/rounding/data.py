"""The statistics of a block as a LightningDataModule: every batch is the same set of tensors."""

from collections.abc import Iterator, Mapping

from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

StatisticsBatch = Mapping[str, tuple[Tensor, Tensor | None]]
"""By projection: damped Hessian ``[heads or 1, d_in, d_in]``, and G ``[heads, d_h, d_h]`` or None."""


class _Repeated(IterableDataset[StatisticsBatch]):
    """The objective of all calibration tokens, once for each of Lightning's steps, without end."""

    def __init__(self, batch: StatisticsBatch) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[StatisticsBatch]:
        while True:
            yield self.batch


class BlockStatistics(LightningDataModule):
    """Delivers the precomputed statistics of one block, without end.

    Nothing in a batch depends on the amount of calibration data, and each batch is all of it: there
    is no sampling noise in the gradients (Section 3.3 of the paper).
    """

    def __init__(self, batch: StatisticsBatch) -> None:
        """Hold the tensors; they stay where they are, on the device if they are there already."""
        super().__init__()
        self.batch = batch

    def train_dataloader(self) -> DataLoader[StatisticsBatch]:
        """Return the loader that Trainer.fit reads."""
        return DataLoader(_Repeated(self.batch), batch_size=None, num_workers=0)
