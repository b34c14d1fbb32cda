"""Deliver pairs of a segment's input and target by a LightningDataModule, in an order from seed and epoch."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from aespa_pl.distributed.processes import ALONE, World
from aespa_pl.errors import UserError
from aespa_pl.storage.batches import Batches, item

Pair = tuple[Tensor, Tensor]
"""Input and target of one segment."""
EPOCHS_PER_SEED = 1_000_003
"""A prime beyond every number of epochs: two seeds share the order of no epoch."""


class _Pairs(Dataset[Pair]):
    """Gives input and target of a segment, from batches of the same sizes; the last may be smaller."""

    def __init__(self, inputs: Batches, targets: Batches) -> None:
        self.inputs = inputs
        self.targets = targets
        self._batch_size = len(inputs[0])
        self._count = self._batch_size * (len(inputs) - 1) + len(inputs[len(inputs) - 1])

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, segment: int) -> Pair:
        batch, place = divmod(segment, self._batch_size)
        return item(self.inputs, batch, place), item(self.targets, batch, place)


class EpochOrder(Sampler[int]):
    """Visits segments in a random order that is another one in each epoch, and known from its number.

    Nothing of it needs a checkpoint: the order follows from seed and epoch, the place from the
    number of segments that have been visited in all epochs.
    """

    def __init__(self, segments: Sequence[int], seed: int, visited: Callable[[], int], visits: int) -> None:
        """Take the segments, of which an epoch has the first ``visits`` of its order.

        ``visited`` tells how many visits there were in all epochs. It is asked when an epoch begins, because
        Lightning makes its loaders before it knows where a training goes on.
        """
        self.segments = segments
        self.visits = visits
        self.seed = seed
        self.visited = visited
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, counted from 0; Lightning calls it."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.visits

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(EPOCHS_PER_SEED * self.seed + self.epoch)
        order = torch.randperm(len(self.segments), generator=generator).tolist()
        first = max(0, self.visited() - self.epoch * self.visits)
        for place in order[first : self.visits]:
            yield self.segments[place]


class _PairLoader(DataLoader[Pair]):
    """Can be resumed inside an epoch, which Lightning knows by these methods; see ``EpochOrder``."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class SegmentPairs(LightningDataModule):
    """Delivers the segments of a calibration text in mini-batches, and some of them for validation."""

    def __init__(
        self,
        inputs: Batches,
        targets: Batches,
        *,
        batch_size: int,
        held_back: float,
        seed: int,
        world: World = ALONE,
    ) -> None:
        """Take the tuned module's inputs, and the outputs that it should have.

        The share ``held_back`` of the segments, the last ones, is only validated on. Several processes train
        together, each on segments of its own, and all take as many steps as the one with the fewest.
        """
        super().__init__()
        self.pairs = _Pairs(inputs, targets)
        self.batch_size = batch_size
        self.seed = seed
        self.world = world
        count = len(self.pairs)
        kept, steps = held_back_and_steps(count, batch_size, held_back)
        self.steps = int(world.smallest(steps))
        # with those that whole mini-batches leave over, but not what this process has more than others
        self.training = range(min(count - kept, (self.steps + 1) * batch_size - 1))
        self.validation = range(count - kept, count)

    def train_dataloader(self) -> DataLoader[Pair]:
        """Return the mini-batches, from where an interrupted training stopped."""
        visits = self.steps * self.batch_size  # each epoch leaves out others than the epoch before
        order = EpochOrder(self.training, self.seed, self._visited, visits)
        return _PairLoader(self.pairs, self.batch_size, sampler=order)

    def val_dataloader(self) -> DataLoader[Pair]:
        """Return the segments that are held back."""
        return DataLoader(self.pairs, self.batch_size, sampler=list(self.validation))

    def _visited(self) -> int:
        return 0 if self.trainer is None else self.trainer.global_step * self.batch_size


def held_back_and_steps(segments: int, batch_size: int, held_back: float) -> tuple[int, int]:
    """Return how many segments are held back, and how many mini-batches the others make; 0 are refused."""
    kept = min(segments, math.ceil(held_back * segments))
    steps = (segments - kept) // batch_size
    if steps == 0:
        smaller = ", or lower the mini-batch (quantization.tuning.*.batch_size)"
        fewer = ", or lower the share that is held back (quantization.tuning.held_back)"
        others = [smaller] * (batch_size > 1) + [fewer] * (kept > 1)
        raise UserError(
            f"tuning: the calibration segments ({segments}, of which {kept} held back) are less than a "
            f"mini-batch of {batch_size}: raise data.calibration.segments{''.join(others)}"
        )
    return kept, steps
