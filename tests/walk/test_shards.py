"""A block that is divided over several shards of the model folder is the block of one shard."""

from pathlib import Path

import pytest
import torch

from aespa_pl.run.journal import Run
from tests.walk.test_tuning import BOTH, LEARNED, NEAREST
from tests.walks import walk


def test_blocks_of_several_shards_are_tuned_and_mended_as_those_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = BOTH | LEARNED | NEAREST | {"tuning.model.blocks": "disk"}
    expected = walk("llama-grouped", tmp_path / "whole", changes).exported().state_dict()
    monkeypatch.setattr("aespa_pl.run.model_writer.LARGEST", 8_000)
    found = walk("llama-grouped", tmp_path, changes)
    lost = found.run.model_folder / "model-00002-2-of-00003.safetensors"
    known = found.journal["blocks"]["0"]["files"]
    assert f"model/{lost.name}" in known
    assert len(known) == 1 + len(list(found.run.model_folder.glob("model-00002-*")))
    for damaged in (False, True):
        if damaged:
            lost.unlink()
            found = walk("llama-grouped", tmp_path, changes, run=Run.open(found.run.folder))
            assert f"{lost.name} is damaged or missing" in found.said.replace("\n", "")
        state = found.exported().state_dict()
        assert all(torch.equal(state[key], tensor) for key, tensor in expected.items())
        assert not found.run.damage()
