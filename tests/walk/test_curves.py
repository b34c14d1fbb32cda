"""Curves over the blocks have numbers of one kind: errors of blocks and the model's divergence are apart."""

from pathlib import Path
from typing import Any

import pytest

from aespa_pl.walk.walk import Walk
from tests.walks import BLOCKS, walk


def test_blocks_and_model_have_curves_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points: dict[str, dict[int, float]] = {}

    def log(_: Walk, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            points.setdefault(name, {})[step] = value

    monkeypatch.setattr(Walk, "_log", log)
    short: dict[str, Any] = {"method": "rtn", "tuning.held_back": 0.3}
    for part in ("blocks", "model"):
        short |= {f"tuning.{part}.enabled": True, f"tuning.{part}.epochs": 1}
    journal = walk("opt", tmp_path, short).journal
    of_blocks = {i: journal["blocks"][str(i)]["tuning"]["start_error"] for i in range(BLOCKS)}
    assert points["tuning/error_before"] == of_blocks
    assert points["tuning/error_after"].keys() == of_blocks.keys()
    assert points["tuning/divergence_before"] == {BLOCKS: journal["tuned"]["start_error"]}
    assert points["tuning/divergence_after"] == {BLOCKS: journal["tuned"]["error"]}
