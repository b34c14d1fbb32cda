"""The tests of a walk share what was walked."""

from typing import Any

import pytest

from aespa_pl.resolve import resolved
from tests.walk.by_hand import Walked
from tests.walks import Quantized, changed, walk


@pytest.fixture(scope="session")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Walked:
    """Does each walk once, in whichever words the settings are."""
    done: dict[str, Quantized] = {}

    def get(name: str, changes: dict[str, Any] | None = None) -> Quantized:
        key = f"{name} {resolved(changed(changes or {}))}"
        if key not in done:
            done[key] = walk(name, tmp_path_factory.mktemp(name), changes)
        return done[key]

    return get
