"""The tests of plans share the shapes of tiny models, and the paper's settings."""

from dataclasses import replace

from aespa_pl.models import family_of
from aespa_pl.planning.shape import Shape, Work
from aespa_pl.resolve import resolved
from aespa_pl.settings import (
    QuantizationSettings,
)
from tests.models.examples import EXAMPLES

PAPER = replace(resolved(QuantizationSettings(method="aespa")), input_correction=0.0)
WORK = Work(segments=10, length=32, batch_size=2, dtype_bytes=2)


def shape(name: str = "llama-grouped") -> Shape:
    config = EXAMPLES[name]()
    return Shape.of(config, family_of(config))
