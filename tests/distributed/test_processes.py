"""Shares cover everything once; one process alone divides nothing. Several: test_devices.py."""

import pytest
import torch

from aespa_pl.block.quantized import QuantizedProjection
from aespa_pl.calibration.statistics import Hessian
from aespa_pl.distributed.processes import ALONE, RowShare, World
from aespa_pl.errors import NumericalError
from aespa_pl.models.family import Projection, Role


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [0, 1, 2, 6, 7, 20])
def test_shares_are_neighbours_of_almost_one_size(count: int, size: int) -> None:
    shares = [range(size)[World(rank, count).indices(size)] for rank in range(count)]
    assert [i for share in shares for i in share] == list(range(size))
    lengths = [len(share) for share in shares]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)  # the first process always has something


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_segments_are_divided_in_whole_batches(count: int) -> None:
    tokens = torch.arange(11)[:, None]
    parts = [World(rank, count).segments(tokens, 3) for rank in range(count)]
    assert torch.equal(torch.cat(parts), tokens)
    batches = [batch for part in parts for batch in part.split(3) if len(batch)]
    expected = tokens.split(3)
    assert len(batches) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(batches, expected, strict=True))


def test_one_process_gets_back_what_it_gives() -> None:
    tensor = torch.randn(4, 3, 5)
    before = tensor.clone()
    ALONE.sum_(tensor)
    assert torch.equal(tensor, before)
    assert ALONE.gather(tensor, 4) is tensor
    assert ALONE.from_first(lambda: tensor) is tensor
    assert (ALONE.sum(1.5), ALONE.largest(7)) == (1.5, 7)
    with pytest.raises(NumericalError, match=r"^mine$"), ALONE.failing_together():
        raise NumericalError("mine")
    for by_heads in (True, False):
        share = RowShare(4, 3, by_heads)
        assert share.part(tensor) is tensor
        assert share.whole(tensor) is tensor
        assert share.taken_heads == slice(0, 4)
        assert share.fraction == 1


@pytest.mark.parametrize(
    ("role", "hessians", "coupled", "by_heads"),
    [
        (Role.OTHER, 1, False, False),
        (Role.OTHER, 1, True, True),
        (Role.OTHER, 4, False, True),
        (Role.KEY, 1, True, True),
    ],
)
def test_rows_stay_with_their_head_where_it_matters(
    role: Role, hessians: int, *, coupled: bool, by_heads: bool
) -> None:
    W = torch.randn(4, 3, 5)
    p = QuantizedProjection(
        Projection("any", "any", role),
        W,
        Hessian(torch.randn(hessians, 5, 5)),
        torch.randn(4, 3, 3) if coupled else None,
        torch.ones(4, 3),
    )
    share = p.share(World(1, 3))
    assert share.by_heads is by_heads
    # of 4 heads the second of 3 processes has the third, of 12 rows the second four
    expected = W[2:3] if by_heads else W.flatten(0, 1)[4:8][None]
    assert torch.equal(share.part(W), expected)
    assert range(4)[share.taken_heads] == (range(2, 3) if by_heads else range(4))
    # steps that take a row after the other follow the G of scores alone, also that of a single key head
    assert p.share(World(1, 3), coupled=False).by_heads is (role is Role.KEY or hessians > 1)


def test_process_without_a_part_works_on_the_first_in_vain() -> None:
    W = torch.randn(2, 3, 5)
    share = RowShare(2, 3, by_heads=True, world=World(2, 3))
    assert torch.equal(share.part(W), W[:1])
    assert range(2)[share.taken_heads] == range(1)
    assert share.fraction == 0
