"""The complexity counts are those of the paper's table."""

import pytest

from aespa_pl.models import family_of
from aespa_pl.planning.complexity import aespa_flops, conventional_flops
from aespa_pl.planning.shape import Shape, Work
from aespa_pl.planning.table import complexity_rows
from tests.models.examples import EXAMPLES

ROWS = {
    "125M": (768, 12, 6.7, 0.24),
    "350M": (1024, 16, 7.5, 0.42),
    "1.3B": (2048, 32, 11, 1.6),
    "2.7B": (2560, 32, 15, 3.2),
    "6.7B": (4096, 32, 34, 13),
    "13B": (5120, 40, 41, 20),
}
"""Hidden size and heads of each OPT, and the table's GFLOP, of two digits each."""


@pytest.mark.parametrize("name", ROWS)
def test_counts_of_opt_are_those_of_the_papers_table(name: str) -> None:
    hidden, heads, conventional, aespa = ROWS[name]
    assert float(f"{conventional_flops(hidden, hidden // heads, 2048) / 1e9:.2g}") == conventional
    assert float(f"{aespa_flops(hidden, hidden // heads) / 1e9:.2g}") == aespa


def test_counts_are_the_papers_sums() -> None:
    d, h, L, B = 96, 8, 40, 3
    assert conventional_flops(d, h, L, B) == B * (6 * h * d * L + 4 * h * L**2 + 2 * L**2 - L - 1)
    assert aespa_flops(d, h) == 6 * h * d**2 + 4 * h**2 * d + h * d - 3


def test_a_plan_shows_both_for_any_shape() -> None:
    config = EXAMPLES["llama-grouped"]()
    shape = Shape.of(config, family_of(config))
    work = Work(segments=8, length=100, batch_size=2, dtype_bytes=4)
    (first, second) = complexity_rows(shape, work)
    d, h = shape.hidden, shape.layout.head_dim
    assert "4 segments of 100 tokens" in first[2]
    assert first[1] == f"{conventional_flops(d, h, 100) / 1e6:.1f} MFLOP"
    assert second[1] == f"{aespa_flops(d, h) / 1e3:.1f} KFLOP"
