"""Sums over A X in causal chunks, in either order, are those with all probabilities."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from aespa_pl.algorithm.objectives import multiplying_in
from aespa_pl.algorithm.second_moments import mirror
from aespa_pl.calibration import attended
from aespa_pl.calibration.attended import AttendedInputs, chunks, over_tokens, stride
from aespa_pl.models.family import BlockLayout
from aespa_pl.models.observed import Attention

SEGMENTS, HEADS, KEY_HEADS, HEAD_SIZE, WIDTH = 2, 4, 2, 6, 10
LAYOUT = BlockLayout((), HEADS, KEY_HEADS, HEAD_SIZE)


def make(length: int, kind: str = "plain") -> Attention:
    """Return queries and keys of some kind of attention."""
    query = torch.randn(SEGMENTS, HEADS, length, HEAD_SIZE)
    key = torch.randn(SEGMENTS, KEY_HEADS, length, HEAD_SIZE)
    attention = Attention(query, key, 0.4)
    if kind == "window":
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        return replace(attention, mask=causal.triu(-3).expand(SEGMENTS, 1, -1, -1))
    if kind == "alibi":
        return replace(attention, alibi=torch.randn(SEGMENTS, HEADS, 1, length))
    return attention


def explicit(attention: Attention) -> Tensor:
    """Return all probabilities ``[B, n_h, L, L]``, row by row in float64."""
    Q, K = attention.query.double(), attention.key.double()
    length = Q.shape[2]
    A = torch.zeros(SEGMENTS, HEADS, length, length, dtype=torch.float64)
    for b in range(SEGMENTS):
        for h in range(HEADS):
            for i in range(length):
                seen = [j for j in range(i + 1) if attention.mask is None or bool(attention.mask[b, 0, i, j])]
                scores = K[b, h * KEY_HEADS // HEADS, seen] @ Q[b, h, i] * attention.scaling
                if attention.alibi is not None:
                    scores = scores + attention.alibi[b, h, 0, seen]
                A[b, h, i, seen] = scores.softmax(0)
    return A


def added(attention: Attention, X: Tensor, *heads: int, every: int = 1, **each: Any) -> tuple[Tensor, Tensor]:
    """Return the sums of ``AttendedInputs``, ``[heads, d, d]`` and ``[heads, d_h, d]``."""
    sums, totals, shifts = AttendedInputs(attention, X, LAYOUT, every), [], []
    for head in heads or range(KEY_HEADS):
        totals.append(torch.zeros(WIDTH, WIDTH))
        shifts.append(torch.zeros(HEAD_SIZE, WIDTH))
        of_head = {name: values[head] for name, values in each.items()}
        sums.add(head, totals[-1], 0.5, shifts=shifts[-1], **of_head)
        mirror(totals[-1])
    return torch.stack(totals), torch.stack(shifts)


@pytest.fixture(params=[False, True], ids=["each query head", "over tokens"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take one of the two ways, whichever has fewer operations."""
    monkeypatch.setattr(attended, "over_tokens", lambda *_: request.param)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("kind", ["plain", "window", "alibi"])
@pytest.mark.parametrize(("length", "least"), [(1, 4), (4, 4), (17, 4), (19, 1)])
@pytest.mark.parametrize("gated", [False, True])
def test_sums_are_those_of_all_probabilities(
    length: int, least: int, kind: str, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attended, "CHUNK_ROWS", least)
    attention, X = make(length, kind), torch.randn(SEGMENTS, length, WIDTH)
    of_heads = (KEY_HEADS, SEGMENTS, HEADS // KEY_HEADS, length)
    shift, root = torch.randn(*of_heads, HEAD_SIZE), torch.rand(*of_heads, 1) if gated else torch.ones(1)
    AX = explicit(attention).unflatten(1, (KEY_HEADS, -1)).transpose(0, 1) @ X.double()[:, None] * root
    gates: dict[str, Any] = {"root": root} if gated else {}
    totals, shifts = added(attention, X, shift=shift, **gates)
    rows = AX.flatten(1, 3)
    torch.testing.assert_close(totals.double(), 0.5 * rows.mT @ rows, rtol=1e-5, atol=1e-5)
    expected = 0.5 * shift.double().flatten(1, 3).mT @ rows
    torch.testing.assert_close(shifts.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shared", "length", "d", "chosen"),
    [
        (1, 2048, 4096, False),  # LLaMA-7B
        (4, 2048, 4096, True),  # Llama 3 8B
        (8, 2048, 2048, True),  # TinyLlama
        (3, 512, 576, True),  # SmolLM2-135M
        (3, 2048, 576, False),
    ],
)
def test_the_way_with_fewer_operations_is_taken(shared: int, length: int, d: int, chosen: bool) -> None:
    assert over_tokens(shared, length, d) is chosen


@pytest.mark.parametrize("kind", ["plain", "window", "alibi"])
def test_probabilities_of_some_heads_and_rows_are_those_of_all(kind: str) -> None:
    attention = make(9, kind)
    A = attention.probabilities()
    torch.testing.assert_close(A.double(), explicit(attention), rtol=1e-5, atol=1e-6)
    for heads, rows in ((slice(1, 3), slice(4, 7)), (slice(3, 4), slice(8, 9))):
        some = attention.probabilities(heads, rows)
        assert some.shape == (SEGMENTS, heads.stop - heads.start, rows.stop - rows.start, rows.stop)
        torch.testing.assert_close(some, A[:, heads, rows, : rows.stop])
        assert not A[:, heads, rows, rows.stop :].any()


@pytest.mark.usefixtures("path")
def test_heads_are_the_same_bits_in_whatever_groups() -> None:
    attention, X = make(20), torch.randn(SEGMENTS, 20, WIDTH)
    together, _ = added(attention, X)
    for head, expected in enumerate(together):
        (alone,), _ = added(attention, X, head)
        assert torch.equal(alone, expected)


@pytest.mark.usefixtures("path")
def test_one_chunk_of_one_value_head_is_computed_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attended, "CHUNK_ROWS", 4)
    sizes: list[torch.Size] = []
    compute = Attention.probabilities

    def note(self: Attention, heads: slice, rows: slice) -> Tensor:
        sizes.append(compute(self, heads, rows).shape)
        return compute(self, heads, rows)

    monkeypatch.setattr(Attention, "probabilities", note)
    added(make(14), torch.randn(SEGMENTS, 14, WIDTH), 1)
    assert sizes == [(SEGMENTS, 2, 4, 4), (SEGMENTS, 2, 4, 8), (SEGMENTS, 2, 4, 12), (SEGMENTS, 2, 2, 14)]


@pytest.mark.parametrize(("length", "rows"), [(1, 128), (512, 128), (1024, 128), (2048, 256), (2049, 257)])
def test_chunks_are_an_eighth_and_not_too_small(length: int, rows: int) -> None:
    assert max(chunk.stop - chunk.start for chunk in chunks(length)) == min(rows, length)


def test_probabilities_are_exact_whatever_the_products_are() -> None:
    attention, seen = make(5), []

    class Watched(Attention):
        def probabilities(self, heads: slice = slice(None), rows: slice = slice(None)) -> Tensor:
            seen.append(torch.get_float32_matmul_precision())
            return super().probabilities(heads, rows)

    watched = Watched(attention.query, attention.key, attention.scaling)
    with multiplying_in("tf32"):
        outside = torch.get_float32_matmul_precision()
        added(watched, torch.randn(SEGMENTS, 5, WIDTH))
    assert outside == "high"
    assert set(seen) == {"highest"}


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("kind", ["plain", "window", "alibi"])
@pytest.mark.parametrize(("length", "every"), [(16, 2), (17, 2), (19, 3), (16, 5)])
def test_every_second_or_third_row_stands_for_all(
    length: int, every: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attended, "CHUNK_ROWS", 2)
    attention, X = make(length, kind), torch.randn(SEGMENTS, length, WIDTH)
    of_heads = (KEY_HEADS, SEGMENTS, HEADS // KEY_HEADS, length)
    shift, root = torch.randn(*of_heads, HEAD_SIZE), torch.rand(*of_heads, 1)
    AX = explicit(attention).unflatten(1, (KEY_HEADS, -1)).transpose(0, 1) @ X.double()[:, None] * root
    taken = torch.arange(length)[every - 1 :: every]
    rows, shifted = AX[..., taken, :].flatten(1, 3), shift[..., taken, :].double().flatten(1, 3)
    totals, shifts = added(attention, X, every=every, shift=shift, root=root)
    weight = 0.5 * length / len(taken)
    torch.testing.assert_close(totals.double(), weight * rows.mT @ rows, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(shifts.double(), weight * shifted.mT @ rows, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("least", "tokens", "length", "d", "expected"),
    [
        (16, 128 * 2048, 2048, 6656, 2),  # LLaMA 30B
        (16, 128 * 2048, 2048, 4096, 4),  # LLaMA 7B
        (0, 128 * 2048, 2048, 4096, 1),
        (16, 16 * 512, 512, 4096, 1),  # few tokens
        (16, 128 * 2048, 64, 64, 2),  # short segments
        (16, 128 * 20, 20, 64, 1),
    ],
)
def test_so_many_tokens_remain_for_each_column(
    least: int, tokens: int, length: int, d: int, expected: int
) -> None:
    found = stride(least, tokens, length, d)
    assert found == expected
    kept = len(range(length)[found - 1 :: found])
    assert kept >= min(length, 32)
    assert tokens / length * kept >= min(least * d, tokens)
