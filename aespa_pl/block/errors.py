"""Say which projection of which block a numerical error is about."""

from collections.abc import Iterator
from contextlib import contextmanager

from aespa_pl.block.quantized import QuantizedBlock, QuantizedProjection
from aespa_pl.errors import NumericalError


@contextmanager
def naming(block: QuantizedBlock, p: QuantizedProjection) -> Iterator[None]:
    """Put the names of block and projection into a numerical error of this context."""
    try:
        yield
    except NumericalError as error:
        raise NumericalError(f"block {block.index}, {p.projection.name}: {error}") from error
