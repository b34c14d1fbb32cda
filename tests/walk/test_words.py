"""A run says what its method does, in a sentence that is true of it, and how long the rest takes."""

from typing import Any

import pytest

from aespa_pl.models import family_of
from aespa_pl.resolve import resolved
from aespa_pl.run.schema import BlockRecord
from aespa_pl.settings import QuantizationSettings
from aespa_pl.walk.record import method_in_words, time_left
from tests.models.examples import make_model
from tests.walks import changed

LEARNED = "rounding of {} projections a block is learned"


@pytest.mark.parametrize(
    ("method", "changes", "expected"),
    [
        ("rtn", {}, "integers are found by rounding to nearest"),
        ("optq", {}, "integers are found by OPTQ"),
        ("aespa-fast", {}, "integers are found by OPTQ and coordinate descent"),
        ("aespa", {}, LEARNED.format(7)),
        ("aespa-hybrid", {}, LEARNED.format(3)),
        ("aespa", {"tuning.blocks.enabled": True}, f"{LEARNED.format(7)}, then blocks are trained"),
        ("aespa", {"tuning.model.enabled": True},
         f"{LEARNED.format(7)}, then the model is trained"),
        ("omniquant", {}, "integers are rounded to nearest on grids that are trained block by block"),
    ],
)  # fmt: skip
def test_method_in_words(method: str, changes: dict[str, Any], expected: str) -> None:
    config = make_model("llama").config
    settings = resolved(changed(changes, QuantizationSettings(method=method)))
    words = method_in_words(settings, family_of(config).layout(config))
    assert words == f"method {method}: {expected}"


def test_time_left_is_the_mean_of_the_finished_blocks_and_the_end() -> None:
    finished = [
        BlockRecord(losses={}, seconds={"grid": grid, "forward": 5.0}, files={}) for grid in (55.0, 35.0)
    ]
    assert time_left(finished, 8, None) == "about 5.0 min left for 6 blocks (an estimate)"
    words = time_left(finished, 3, epochs=2)
    assert words.endswith("left for 1 block and the end-to-end tuning (an estimate)")
