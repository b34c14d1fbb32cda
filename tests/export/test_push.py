"""A folder is pushed to the hub after it is complete, and only with a login."""

from pathlib import Path

import pytest

from aespa_pl.commands import export as command
from aespa_pl.commands.export import export
from aespa_pl.errors import UserError
from tests.export.folders import files
from tests.export.runs import Known


class Hub:
    """Stands in for the hub's client."""

    calls: list[tuple[str, object]]
    known = True

    def __init__(self) -> None:
        Hub.calls = getattr(Hub, "calls", [])

    def whoami(self) -> None:
        if not self.known:
            raise OSError("401")

    def create_repo(self, name: str, *, exist_ok: bool) -> None:
        Hub.calls.append(("create", (name, exist_ok)))

    def upload_folder(self, *, folder_path: Path, repo_id: str) -> None:
        if repo_id == "me/broken":
            raise OSError("no network")
        Hub.calls.append(("upload", (files(folder_path), repo_id)))


def test_folder_is_pushed(
    fresh: Known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "HfApi", Hub)
    Hub.calls = []
    out = tmp_path / "out"
    export(str(fresh.folder), format="gguf", output=str(out), verify="bytes", push_to_hub="me/small")
    assert Hub.calls == [
        ("create", ("me/small", True)),
        ("upload", ({"model.gguf", "README.md"}, "me/small")),
    ]
    assert "pushed to https://huggingface.co/me/small" in capsys.readouterr().out


def test_upload_that_fails_leaves_the_folder(
    fresh: Known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "HfApi", Hub)
    out = tmp_path / "an output"
    with pytest.raises(
        UserError,
        match=r"me/broken cannot be uploaded .no network.*complete in .*: hf upload \S+ '.*an output'",
    ):
        export(str(fresh.folder), format="gguf", output=str(out), verify="bytes", push_to_hub="me/broken")
    assert (out / "model.gguf").is_file()


def test_a_name_that_the_hub_has_not_is_refused_before_anything_is_written(
    fresh: Known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "HfApi", Hub)
    with pytest.raises(UserError, match=r"--push_to_hub is me/my model!: expected a name on the hub"):
        export(str(fresh.folder), format="hf", output=str(tmp_path / "out"), push_to_hub="me/my model!")
    assert not (tmp_path / "out").exists()


def test_push_without_login_is_refused_before_anything_is_written(
    fresh: Known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hub, "known", False)
    monkeypatch.setattr(command, "HfApi", Hub)
    with pytest.raises(UserError, match=r"--push_to_hub me/small: the hub does not know who you are"):
        export(str(fresh.folder), format="hf", output=str(tmp_path / "out"), push_to_hub="me/small")
    assert not (tmp_path / "out").exists()
