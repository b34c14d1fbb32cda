"""A file on the disk is complete, whatever goes wrong."""

import json
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from aespa_pl.errors import UserError
from aespa_pl.storage.files import (
    read_json,
    read_tensors,
    remove_leftovers,
    write_json,
    write_tensors,
    write_whole,
)
from tests.disks import files, full, refused


def text(content: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text(content)

    return write


def half_then_full(path: Path) -> None:
    path.write_text("ha")
    full()


@pytest.fixture
def _small_files_only() -> Iterator[None]:
    """Let the system refuse to write more than 64 kB to a file, root's as well."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_file_is_written_into_folders_that_are_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file.txt"
    write_whole(path, text("whole"))
    assert path.read_text() == "whole"
    assert files(path.parent) == ["file.txt"]


def test_old_content_stays_until_the_new_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    seen: list[str] = []

    def write(temporary: Path) -> None:
        assert temporary.parent == tmp_path  # elsewhere it could not be renamed at once
        temporary.write_text("ne")
        seen.append(path.read_text())
        temporary.write_text("new")
        seen.append(path.read_text())

    write_whole(path, write)
    assert seen == ["old", "old"]
    assert path.read_text() == "new"
    assert files(tmp_path) == ["file.txt"]


def test_content_is_on_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, replace, fsync = tmp_path / "file.txt", Path.replace, os.fsync
    events: list[str | int] = []

    def flush(handle: int) -> None:
        size = os.fstat(handle).st_size
        events.append("folder" if os.path.samestat(os.fstat(handle), tmp_path.stat()) else size)
        fsync(handle)

    def rename(self: Path, target: Path) -> Path:
        events.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(Path, "replace", rename)
    write_whole(path, text("five!"))
    assert events == [5, "rename", "folder"]


@pytest.mark.parametrize("old", [None, "old"])
def test_full_disk_leaves_what_was_there(old: str | None, tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    if old is not None:
        path.write_text(old)
    with refused(tmp_path):
        write_whole(path, half_then_full)
    assert files(tmp_path) == ([] if old is None else ["file.txt"])
    assert old is None or path.read_text() == old


@pytest.mark.parametrize(("owner", "name"), [(os, "fsync"), (Path, "replace")])
def test_disk_that_is_full_only_when_flushed_leaves_what_was_there(
    owner: object, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    monkeypatch.setattr(owner, name, full)
    with refused(tmp_path):
        write_whole(path, text("new"))
    assert path.read_text() == "old"
    assert files(tmp_path) == ["file.txt"]


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt("mine")])
def test_other_failures_pass_through_and_leave_nothing(error: BaseException, tmp_path: Path) -> None:
    def write(temporary: Path) -> None:
        temporary.write_text("half")
        raise error

    with pytest.raises(type(error), match="mine"):
        write_whole(tmp_path / "file.txt", write)
    assert files(tmp_path) == []


def test_what_a_kill_left_is_overwritten_and_gone(tmp_path: Path) -> None:
    names: list[Path] = []

    def write(temporary: Path) -> None:
        names.append(temporary)
        temporary.write_text("whole")

    write_whole(tmp_path / "file.txt", write)
    names[0].write_text("half of something long")
    write_whole(tmp_path / "file.txt", write)
    assert (tmp_path / "file.txt").read_text() == "whole"
    assert files(tmp_path) == ["file.txt"]


def test_file_in_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with refused(tmp_path / "runs" / "run", "Not a directory"):
        write_json(tmp_path / "runs" / "run" / "metrics.json", {})


@pytest.mark.usefixtures("_small_files_only")
def test_tensors_that_do_not_fit_leave_nothing(tmp_path: Path) -> None:
    write_tensors(tmp_path / "small.safetensors", {"a": torch.zeros(100)}, {})
    with refused(tmp_path, "File too large"):
        write_tensors(tmp_path / "large.safetensors", {"a": torch.zeros(2**16)}, {})
    assert files(tmp_path) == ["small.safetensors"]


def test_json_is_read_back(tmp_path: Path) -> None:
    content = {"perplexity": {"c4": 12.5}, "names": ["a", "é"], "none": None}
    write_json(tmp_path / "metrics.json", content)
    written = (tmp_path / "metrics.json").read_text(encoding="utf-8")
    assert json.loads(written) == read_json(tmp_path / "metrics.json") == content
    assert written.endswith("}\n")
    assert len(written.splitlines()) > 3


@pytest.mark.parametrize("content", [b"", b'{"loss": 1', b"\xff\xfe", None])
def test_json_that_cannot_be_read_is_named(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=rf"^{path} cannot be read \(.*\): remove it$"):
        read_json(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_json_does_not_know_is_refused_before_anything_is_lost(value: float, tmp_path: Path) -> None:
    write_json(tmp_path / "metrics.json", {"loss": 1.0})
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "metrics.json", {"loss": value})
    assert json.loads((tmp_path / "metrics.json").read_text()) == {"loss": 1.0}
    assert files(tmp_path) == ["metrics.json"]


def test_tensors_are_read_back_with_their_metadata(tmp_path: Path) -> None:
    whole = torch.arange(12, dtype=torch.float16).view(3, 4)
    tensors = {"view": whole.T, "part": whole[:, 1:3], "bytes": torch.tensor([0, 255]).byte()}
    learned = torch.ones(2, requires_grad=True)
    write_tensors(tmp_path / "x.safetensors", tensors | {"learned": learned}, {"format": "pt"})
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        for name, tensor in tensors.items():
            assert file.get_tensor(name).dtype == tensor.dtype
            assert torch.equal(file.get_tensor(name), tensor)
        assert file.get_tensor("learned").tolist() == [1, 1]


def test_files_have_the_permissions_of_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "tensors.safetensors"
    before = os.umask(0o027)
    try:
        write_tensors(path, {"x": torch.ones(2)}, {})
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    for name in (".tmpAb3xyz", ".model.safetensors.partial", "model.safetensors", ".gitignore"):
        (tmp_path / name).write_text("x")
    remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors", ".gitignore"}
    remove_leftovers(tmp_path / "nothing")


def test_a_file_of_no_tensors_can_be_read(tmp_path: Path) -> None:
    """Such as the moved values of a block whose projections all keep their weights."""
    write_tensors(tmp_path / "none", {}, {})
    assert read_tensors(tmp_path / "none") == {}
