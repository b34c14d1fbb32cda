"""Weights in pickles are read as the library reads them, once, and never anything but weights."""

import json
import logging
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from aespa_pl.errors import UserError
from aespa_pl.models import pickles
from aespa_pl.models.pretrained import PretrainedFolder
from tests.disks import leave_free
from tests.models.examples import make_ids, make_model, save
from tests.models.test_pretrained import stream


def unsafe(folder: Path, *, shards: int = 1, legacy: bool = False) -> Path:
    """Replace the safetensors of a folder by pickles, as the hub's older models have them."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    if shards == 1:
        files = {"pytorch_model.bin": names}
    else:
        files = {f"pytorch_model-{i}-of-{shards}.bin": names[i::shards] for i in range(shards)}
        content = {name: file for file, inside in files.items() for name in inside}
        (folder / "pytorch_model.bin.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": content})
        )
    for file, inside in files.items():
        torch.save(
            {name: tensors[name] for name in inside}, folder / file, _use_new_zipfile_serialization=not legacy
        )
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in one pickle."""
    return unsafe(save(make_model("opt", torch.float32), tmp_path / "model"))


def kept(cache: Path) -> list[Path]:
    return sorted((cache / "weights").glob("[!.]*"))


@pytest.mark.parametrize("form", [{}, {"shards": 3}, {"legacy": True}], ids=str)
@pytest.mark.parametrize("name", ["opt", "bloom", "llama-grouped"])
def test_logits_are_those_of_the_librarys_model(
    name: str, form: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    folder = unsafe(save(make_model(name, torch.float32), tmp_path / "model"), **form)
    ids = make_ids()
    expected = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=False)(ids).logits
    torch.testing.assert_close(stream(folder, ids), expected.detach(), rtol=1e-5, atol=1e-5)
    assert len(kept(tmp_path / "xdg" / "aespa_pl")) == form.get("shards", 1)


def test_stored_bits_are_kept(tmp_path: Path, cache: Path) -> None:
    model = make_model("llama", torch.bfloat16)
    pretrained = PretrainedFolder.open(unsafe(save(model, tmp_path / "model")), cache)
    for name, tensor in model.state_dict().items():
        assert torch.equal(pretrained.tensor(name), tensor)


def test_tied_and_transposed_tensors_are_written(tmp_path: Path, cache: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3)}
    tensors |= {"b": tensors["a"], "c": tensors["a"].T, "d": tensors["a"][1]}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    found = load_file(pickles.converted(tmp_path / "pytorch_model.bin", cache))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_safetensors_come_first(tmp_path: Path, cache: Path) -> None:
    folder = save(make_model("opt", torch.float32), tmp_path / "model")
    (folder / "pytorch_model.bin").write_bytes(b"never looked at")
    PretrainedFolder.open(folder, cache)
    assert not cache.exists()


def refuse_to_load(*_: object, **__: object) -> None:
    raise AssertionError("read again")


def test_a_pickle_is_read_once(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        first = PretrainedFolder.open(folder, cache)
    (line,) = caplog.messages
    assert str(folder / "pytorch_model.bin") in line
    monkeypatch.setattr(torch, "load", refuse_to_load)
    other_place = folder.rename(folder.with_name("moved"))
    assert PretrainedFolder.open(other_place, cache).tensors == first.tensors
    assert len(caplog.messages) == 1


def test_another_pickle_of_the_same_name_and_size_is_another_file(folder: Path, cache: Path) -> None:
    PretrainedFolder.open(folder, cache)
    path = folder / "pytorch_model.bin"
    tensors: dict[str, Tensor] = torch.load(path, weights_only=True)
    tensors["model.decoder.layers.0.fc1.bias"].zero_()
    torch.save(tensors, path)
    fresh = PretrainedFolder.open(folder, cache)
    assert not fresh.tensor("model.decoder.layers.0.fc1.bias").any()
    assert len(kept(cache)) == 2


@pytest.mark.parametrize("length", [0, 20, -8])
def test_a_damaged_file_in_the_cache_is_made_again(folder: Path, cache: Path, length: int) -> None:
    PretrainedFolder.open(folder, cache)
    (path,) = kept(cache)
    good = path.read_bytes()
    path.write_bytes(good[:length])
    PretrainedFolder.open(folder, cache)
    assert path.read_bytes() == good


class Touch:
    """An object whose pickle makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickle_that_runs_code_is_refused_and_does_not_run_it(
    folder: Path, cache: Path, tmp_path: Path, legacy: bool
) -> None:
    victim = tmp_path / "made by the pickle"
    path = folder / "pytorch_model.bin"
    torch.save({"a": torch.ones(2), "b": Touch(victim)}, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(UserError, match=rf"{path} is damaged, or a pickle of more than weights"):
        PretrainedFolder.open(folder, cache)
    assert not victim.exists()
    assert kept(cache) == []
    pickle.loads(pickle.dumps(Touch(victim)))  # it would have
    assert victim.exists()


@pytest.mark.parametrize(
    "content",
    [
        [torch.ones(2)],
        torch.ones(2),
        {"model": {"a": torch.ones(2)}},
        {1: torch.ones(2)},
        {"a": torch.ones(2).to_sparse()},
    ],
)
def test_other_than_tensors_by_name_is_refused(folder: Path, cache: Path, content: Any) -> None:
    torch.save(content, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="holds something else than dense tensors by name"):
        PretrainedFolder.open(folder, cache)


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"",
        lambda whole: whole[:300],
        lambda whole: whole[: len(whole) // 2],
        lambda whole: b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1\n",
    ],
    ids=["empty", "head", "half", "git-lfs"],
)
def test_a_damaged_pickle_is_one_line(folder: Path, cache: Path, damage: Any) -> None:
    path = folder / "pytorch_model.bin"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=f"model.pretrained: {path} is damaged") as caught:
        PretrainedFolder.open(folder, cache)
    assert "\n" not in str(caught.value)
    assert kept(cache) == []


def test_a_missing_shard_is_named(tmp_path: Path, cache: Path) -> None:
    folder = unsafe(save(make_model("opt", torch.float32), tmp_path / "model"), shards=3)
    (folder / "pytorch_model-1-of-3.bin").unlink()
    with pytest.raises(UserError, match=f"pytorch_model-1-of-3.bin missing in {folder}"):
        PretrainedFolder.open(folder, cache)


def test_a_full_disk_is_noticed_before(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_free(monkeypatch, 5)
    with pytest.raises(UserError, match=r"data.cache: .* has [\d.]+ K?B free, but the weights of"):
        PretrainedFolder.open(folder, cache)


def test_a_cache_that_can_not_be_made_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"data.cache: cannot write to .*file/weights"):
        PretrainedFolder.open(folder, tmp_path / "file")
