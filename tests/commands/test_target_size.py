"""A file is no larger than its target, whatever it says of its own making."""

from itertools import count

import pytest

from aespa_pl.commands import target
from aespa_pl.progress import PlainConsole, WalkProgress
from aespa_pl.settings import QuantizationSettings
from tests.jobs import embedded, prepared


def test_a_file_whose_metadata_grow_with_each_choice_stays_below_the_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grown = count()
    monkeypatch.setattr(target, "_other_bytes", lambda *_: 20_000 + 500 * min(next(grown), 6))
    settings = embedded("llama", QuantizationSettings(method="rtn", format="auto", target="400 kB"))
    with WalkProgress(PlainConsole()) as progress:
        _, mixture = target.for_target(prepared(settings), settings, None, progress)
    assert mixture is not None
    assert 390_000 < mixture.bytes <= 400_000
