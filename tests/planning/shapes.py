"""The tests of plans share the shapes of tiny models, and the paper's settings."""

from dataclasses import replace

import torch

from aespa_pl.models import family_of
from aespa_pl.planning import needs
from aespa_pl.planning.partition import WHOLE, Partition
from aespa_pl.planning.shape import Setup, Shape, Work
from aespa_pl.resolve import resolved
from aespa_pl.settings import DataSettings, ObjectiveSettings, QuantizationSettings
from tests.models.examples import EXAMPLES

ALL_TOKENS = ObjectiveSettings(value_tokens=0)
PAPER = replace(resolved(QuantizationSettings(method="aespa", objective=ALL_TOKENS)), input_correction=0.0)
WORK = Work(segments=10, length=32, batch_size=2, dtype_bytes=2)


def setup(
    shape: Shape,
    work: Work,
    settings: QuantizationSettings,
    *,
    accelerator: bool = False,
    on_disk: bool = False,
) -> Setup:
    data = DataSettings(hidden_states="disk" if on_disk else "memory")
    return Setup(shape, work, data, settings, torch.device("cuda" if accelerator else "cpu"))


def device_bytes(
    shape: Shape,
    work: Work,
    settings: QuantizationSettings,
    partition: Partition = WHOLE,
    *,
    accelerator: bool = False,
) -> dict[str, int]:
    return needs.device_bytes(setup(shape, work, settings, accelerator=accelerator), partition)


def shape(name: str = "llama-grouped") -> Shape:
    config = EXAMPLES[name]()
    return Shape.of(config, family_of(config).layouts(config))
