"""A X in causal chunks is the product with all probabilities."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from aespa_pl.algorithm.objectives import multiplying_in
from aespa_pl.calibration import collector
from aespa_pl.calibration.collector import attention_weighted_inputs, chunk_rows
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


@pytest.mark.parametrize("kind", ["plain", "window", "alibi"])
@pytest.mark.parametrize(("length", "least"), [(1, 4), (3, 4), (4, 4), (16, 4), (17, 4), (19, 1)])
def test_chunks_are_the_full_product(
    length: int, least: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "CHUNK_ROWS", least)
    attention, X = make(length, kind), torch.randn(SEGMENTS, length, WIDTH)
    A = explicit(attention).unflatten(1, (KEY_HEADS, -1))
    heads = range(KEY_HEADS)
    found = attention_weighted_inputs(attention, X, LAYOUT, heads)
    for head, AX in zip(heads, found, strict=True):
        expected = A[:, head] @ X.double()[:, None]
        torch.testing.assert_close(AX.double(), expected.flatten(0, -2), rtol=1e-5, atol=1e-5)
        assert AX.dtype == torch.float32


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


def test_heads_are_the_same_bits_in_whatever_groups() -> None:
    attention, X = make(20), torch.randn(SEGMENTS, 20, WIDTH)
    together = [AX.clone() for AX in attention_weighted_inputs(attention, X, LAYOUT, range(2))]
    for head, expected in enumerate(together):
        (alone,) = attention_weighted_inputs(attention, X, LAYOUT, range(head, head + 1))
        assert torch.equal(alone, expected)


def test_one_chunk_of_one_value_head_is_computed_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "CHUNK_ROWS", 4)
    sizes: list[torch.Size] = []
    compute = Attention.probabilities

    def note(self: Attention, heads: slice, rows: slice) -> Tensor:
        sizes.append(compute(self, heads, rows).shape)
        return compute(self, heads, rows)

    monkeypatch.setattr(Attention, "probabilities", note)
    list(attention_weighted_inputs(make(14), torch.randn(SEGMENTS, 14, WIDTH), LAYOUT, range(1, 2)))
    assert sizes == [(SEGMENTS, 2, 4, 4), (SEGMENTS, 2, 4, 8), (SEGMENTS, 2, 4, 12), (SEGMENTS, 2, 2, 14)]


@pytest.mark.parametrize(("length", "rows"), [(1, 128), (512, 128), (1024, 128), (2048, 256), (2049, 257)])
def test_chunks_are_an_eighth_and_not_too_small(length: int, rows: int) -> None:
    assert chunk_rows(length) == rows


def test_probabilities_are_exact_whatever_the_products_are() -> None:
    attention, seen = make(5), []

    class Watched(Attention):
        def probabilities(self, heads: slice = slice(None), rows: slice = slice(None)) -> Tensor:
            seen.append(torch.get_float32_matmul_precision())
            return super().probabilities(heads, rows)

    watched = Watched(attention.query, attention.key, attention.scaling)
    with multiplying_in("tf32"):
        outside = torch.get_float32_matmul_precision()
        list(attention_weighted_inputs(watched, torch.randn(SEGMENTS, 5, WIDTH), LAYOUT, range(2)))
    assert outside == "high"
    assert set(seen) == {"highest"}
