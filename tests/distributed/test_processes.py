"""Shares cover everything once; one process alone divides nothing. Several: tests/test_devices.py."""

import pytest
import torch

from aespa_pl.distributed.processes import ALONE, Ranks
from aespa_pl.distributed.rows import Shard


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [0, 1, 2, 6, 7, 20])
def test_shares_are_neighbours_of_almost_one_size(count: int, size: int) -> None:
    shares = [range(size)[Ranks(rank, count).share(size)] for rank in range(count)]
    assert [i for share in shares for i in share] == list(range(size))
    lengths = [len(share) for share in shares]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)  # the first process always has something


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_segments_are_divided_in_whole_batches(count: int) -> None:
    tokens = torch.arange(11)[:, None]
    parts = [Ranks(rank, count).segments(tokens, 3) for rank in range(count)]
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
    with pytest.raises(ArithmeticError, match=r"^mine$"), ALONE.failing_together():
        raise ArithmeticError("mine")
    shard = Shard.of(tensor, torch.randn(4, 5, 5), None, ALONE)
    assert shard.by_heads
    for same in (shard.part, shard.whole, shard.of_heads):
        assert same(tensor) is tensor
    assert shard.fraction == 1
    assert ALONE.traffic.calls == 0


@pytest.mark.parametrize(
    ("hessians", "coupled", "by_heads"), [(1, False, False), (1, True, True), (4, False, True)]
)
def test_rows_stay_with_their_head_where_it_matters(
    hessians: int, *, coupled: bool, by_heads: bool
) -> None:
    W, G = torch.randn(4, 3, 5), torch.randn(4, 3, 3)
    shard = Shard.of(W, torch.randn(hessians, 5, 5), G if coupled else None, Ranks(1, 3))
    assert shard.by_heads is by_heads
    # of 4 heads the second of 3 processes has the third, of 12 rows the second four
    expected = W[2:3] if by_heads else W.flatten(0, 1)[4:8][None]
    assert torch.equal(shard.part(W), expected)


def test_process_without_a_part_works_on_the_first_in_vain() -> None:
    W = torch.randn(2, 3, 5)
    shard = Shard(2, 3, by_heads=True, ranks=Ranks(2, 3))
    assert torch.equal(shard.part(W), W[:1])
    assert shard.fraction == 0
