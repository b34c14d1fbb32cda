"""The processes of a run have the blocks of an end-to-end tuning in one place."""

from typing import Literal, cast

import pytest

from aespa_pl.commands.application import _with_agreed_place
from aespa_pl.distributed.processes import World
from aespa_pl.settings import ModelTuningSettings, QuantizationSettings, TuningSettings
from tests.jobs import embedded, prepared

Place = Literal["memory", "disk"]


class Two:
    """Two processes, the other one of which has room for a model or not."""

    def __init__(self, other: Place) -> None:
        self.other = other

    def largest(self, number: int) -> int:
        return max(number, int(self.other == "disk"))


@pytest.mark.parametrize(
    ("own", "other", "agreed"),
    [("memory", "memory", "memory"), ("memory", "disk", "disk"), ("disk", "memory", "disk")],
)
def test_blocks_are_on_disk_where_they_do_not_fit_in_one_process(
    own: Place, other: Place, agreed: Place
) -> None:
    tuning = TuningSettings(model=ModelTuningSettings(blocks=own))
    quantization = QuantizationSettings(method="aespa-tuned", tuning=tuning)
    job = prepared(embedded("llama", quantization))
    found = _with_agreed_place(job, cast(World, Two(other)))
    assert found.quantization.tuning.model.blocks == agreed
