"""The cache saves work, never changes a result, and never stops a run."""

import logging
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aespa_pl.data import tokens
from aespa_pl.data.tokens import cached_tokens
from aespa_pl.storage.cache import cache_folder
from tests.disks import flip, full, truncate

TOKENS = torch.arange(600, dtype=torch.int64).view(20, 30)


class Maker:
    """Makes tokens, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Tensor:
        self.calls += 1
        return TOKENS


@pytest.fixture
def maker() -> Maker:
    return Maker()


def only_file(folder: Path) -> Path:
    (path,) = (folder / "tokens").glob("[!.]*")
    return path


def test_tokens_are_made_once(tmp_path: Path, maker: Maker) -> None:
    folder = tmp_path / "not" / "there"
    for _ in range(3):
        cached = cached_tokens(folder, {"seed": 1}, maker)
        assert torch.equal(cached, TOKENS)
        assert cached.dtype == torch.int64
    assert maker.calls == 1
    assert torch.equal(load_file(only_file(folder))["tokens"], TOKENS)


def test_other_origins_make_other_tokens(
    tmp_path: Path, maker: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached_tokens(tmp_path, {"seed": 1}, maker)
    cached_tokens(tmp_path, {"seed": 2}, maker)
    assert maker.calls == 2
    monkeypatch.setattr(tokens, "VERSION", tokens.VERSION + 1)
    cached_tokens(tmp_path, {"seed": 1}, maker)
    assert maker.calls == 3


def empty(path: Path) -> None:
    path.write_bytes(b"")


def write_other_tokens(path: Path) -> None:
    save_file({"tokens": TOKENS + 1}, path)


def write_other_tensor(path: Path) -> None:
    save_file({"ids": TOKENS}, path)


@pytest.mark.parametrize("damage", [truncate, empty, flip, write_other_tokens, write_other_tensor])
def test_a_damaged_file_is_noticed_and_made_again(
    tmp_path: Path, maker: Maker, caplog: pytest.LogCaptureFixture, damage: object
) -> None:
    cached_tokens(tmp_path, {}, maker)
    path = only_file(tmp_path)
    assert callable(damage)
    damage(path)
    for _ in range(2):
        assert torch.equal(cached_tokens(tmp_path, {}, maker), TOKENS)
    assert maker.calls == 2
    assert only_file(tmp_path) == path
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(path) in record.getMessage()


def test_tokens_of_another_origin_under_the_same_name_are_refused(tmp_path: Path, maker: Maker) -> None:
    cached_tokens(tmp_path, {"seed": 1}, maker)
    first = only_file(tmp_path)
    content = first.read_bytes()
    first.unlink()
    cached_tokens(tmp_path, {"seed": 2}, maker)
    only_file(tmp_path).write_bytes(content)
    cached_tokens(tmp_path, {"seed": 2}, maker)
    assert maker.calls == 3


def test_a_folder_that_cannot_be_made_is_only_a_warning(
    tmp_path: Path, maker: Maker, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "cache"
    assert torch.equal(cached_tokens(folder, {}, maker), TOKENS)
    assert "data.cache" in caplog.text
    assert str(folder) in caplog.text


def test_a_full_disk_is_only_a_warning_and_leaves_nothing(
    tmp_path: Path, maker: Maker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", full)
    assert torch.equal(cached_tokens(tmp_path, {}, maker), TOKENS)
    assert "No space left on device" in caplog.text
    assert [path.name for path in (tmp_path / "tokens").iterdir()] == [".lock"]


def test_the_cache_lies_where_xdg_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg/aespa_pl"
    for ignored in ["", "relative"]:
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_folder() == tmp_path / ".cache/aespa_pl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / ".cache/aespa_pl"
