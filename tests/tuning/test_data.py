"""Segments come in an order that depends on seed and epoch only, and errors are for people."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from aespa_pl.errors import UserError
from aespa_pl.storage.batches import BatchesOnDisk
from aespa_pl.tuning.data import EpochOrder, SegmentPairs


def stream(count: int, first: int = 0) -> list[Tensor]:
    """Segments that say their number, in batches of 4."""
    numbers = torch.arange(first, first + count)
    return list(numbers[:, None].expand(count, 3).float().split(4))


def order_of(
    segments: range, seed: int, visited: Callable[[], int] = lambda: 0, visits: int | None = None
) -> EpochOrder:
    return EpochOrder(segments, seed, visited, len(segments) if visits is None else visits)


def visited(order: EpochOrder, epoch: int) -> list[int]:
    order.set_epoch(epoch)
    return list(order)


def test_an_epoch_visits_every_segment_once_in_an_order_of_its_own() -> None:
    orders = [visited(order_of(range(20), seed), epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert visited(order_of(range(20), 1), 1) == orders[3]


def test_an_order_goes_on_in_the_middle_of_an_epoch() -> None:
    whole = [visited(order_of(range(10), 5), epoch) for epoch in range(3)]
    resumed = order_of(range(10), 5, visited=lambda: 14)
    assert visited(resumed, 1) == whole[1][4:]
    assert visited(order_of(range(10), 5, visited=lambda: 20), 2) == whole[2]
    assert len(resumed) == 10


def test_segments_that_an_epoch_leaves_out_are_visited_in_others() -> None:
    """Ten segments, of which mini-batches of four leave two over."""
    whole = [visited(order_of(range(10), 5), epoch) for epoch in range(4)]
    found = [visited(order_of(range(10), 5, visits=8), epoch) for epoch in range(4)]
    assert found == [order[:8] for order in whole]
    assert {segment for order in found for segment in order} == set(range(10))
    resumed = order_of(range(10), 5, visited=lambda: 11, visits=8)
    assert visited(resumed, 1) == whole[1][3:8]
    assert len(resumed) == 8


@pytest.mark.parametrize("on_disk", [False, True])
def test_pairs_belong_together_and_those_held_back_are_not_trained_on(on_disk: bool, tmp_path: Path) -> None:
    streams = [stream(11), stream(11, first=100)]
    inputs, targets = (BatchesOnDisk(tmp_path, s) for s in streams) if on_disk else streams
    pairs = SegmentPairs(inputs, targets, batch_size=2, held_back=0.1, seed=0)
    seen: dict[str, list[float]] = {}
    for kind, loader in (("train", pairs.train_dataloader()), ("val", pairs.val_dataloader())):
        for x, y in loader:
            assert torch.equal(x + 100, y)
            seen.setdefault(kind, []).extend(x[:, 0].tolist())
    assert len(set(seen["train"])) == len(seen["train"]) == 8
    assert set(seen["train"]) < set(range(9))
    assert seen["val"] == [9, 10]


def test_too_few_segments_are_refused_with_what_to_do() -> None:
    with pytest.raises(
        UserError, match=r"\(5, of which 2 held back\).*raise.*mini-batch.*share that is held back"
    ):
        SegmentPairs(stream(5), stream(5), batch_size=4, held_back=0.4, seed=0)
    with pytest.raises(UserError, match=r"raise data\.calibration\.segments$"):  # nothing else would help
        SegmentPairs(stream(1), stream(1), batch_size=1, held_back=0.4, seed=0)
