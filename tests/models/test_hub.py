"""``model.pretrained`` leads to the right folder; the hub's functions are replaced."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import (
    CacheNotFound,
    GatedRepoError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from aespa_pl.errors import UserError
from aespa_pl.models import hub as source
from aespa_pl.models.hub import resolve

SAFE = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json"]
PICKLED = ["config.json", "pytorch_model.bin", "tokenizer.json"]


@dataclass
class Hub:
    """Stands for the hub, with files by revision, pull requests, or an error for whoever asks."""

    files: dict[str | None, list[str]]
    offers: list[str | None] = field(default_factory=list)
    error: Exception | None = None
    cached: list[Any] | None = None
    downloads: list[dict[str, Any]] = field(default_factory=list)

    def model_info(self, name: str, revision: str | None = None) -> Any:
        if self.error is not None:
            raise self.error
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in self.files[revision]])

    def get_repo_discussions(self, name: str, author: str, discussion_type: str) -> list[Any]:
        assert (author, discussion_type) == ("SFconvertbot", "pull_request")
        return [SimpleNamespace(git_reference=reference) for reference in self.offers]

    def snapshot_download(self, name: str, **options: Any) -> str:
        if self.error is not None:
            raise self.error
        self.downloads.append({"name": name, **options})
        return "/cache/snapshot"

    def scan_cache_dir(self) -> Any:
        if self.cached is None:
            raise CacheNotFound("no cache", cache_dir=Path("/cache"))
        return SimpleNamespace(repos=self.cached)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    """A hub that has the model in safetensors; the working folder is empty."""
    hub = Hub({None: SAFE})
    monkeypatch.setattr(source, "HfApi", lambda: hub)
    monkeypatch.setattr(source, "snapshot_download", hub.snapshot_download)
    monkeypatch.setattr(source, "scan_cache_dir", hub.scan_cache_dir)
    monkeypatch.chdir(tmp_path)
    return hub


def refused(message: str, pretrained: str = "org/name", revision: str | None = None) -> None:
    with pytest.raises(UserError, match=message):
        resolve(pretrained, revision)


def test_local_folder_is_itself(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve("org/name") == Path("org/name")  # a folder comes before the hub
    assert resolve(str(tmp_path)) == tmp_path
    assert not hub.downloads


def test_home_is_expanded(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert resolve("~/model") == tmp_path / "model"


@pytest.mark.parametrize(
    "path", ["./model", "../model", "/no/model", "~/no-model", "a/b/c", "org/na me", "C:\\model"]
)
def test_wrong_path_is_not_looked_for_on_the_hub(hub: Hub, path: str) -> None:
    refused("there is no folder .*: give a folder with config.json and weights", path)
    assert not hub.downloads


def test_file_is_not_a_folder(hub: Hub, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    refused("model.safetensors is a file: give the folder that it lies in", str(path))


def test_hub_name_is_downloaded_without_pickles_and_code(hub: Hub) -> None:
    assert resolve("org/name") == Path("/cache/snapshot")
    (download,) = hub.downloads
    assert (download["name"], download["revision"]) == ("org/name", None)
    assert all(fits(download, name) for name in SAFE)
    assert fits(download, "model_00001-of-00072.safetensors")  # as bigscience/bloom names them
    assert fits(download, "model.safetensors.index.json")
    unwanted = ["pytorch_model.bin", "modeling.py", "tokenizer_x.py", "vocab.py", "a.pt", "model.pth"]
    assert not any(fits(download, name) for name in unwanted)
    assert not fits(download, "consolidated.safetensors")  # Mistral's second copy


@pytest.mark.parametrize(
    "name", ["README.md", "LICENSE", "LICENSE.txt", "LICENCE", "NOTICE.md", "tokenizer.model"]
)
def test_card_and_licence_come_with_the_model(name: str, hub: Hub) -> None:
    resolve("org/name")
    assert fits(hub.downloads[0], name)


def test_revision_of_the_user_is_taken(hub: Hub) -> None:
    hub.files["v2"] = SAFE
    resolve("org/name", "v2")
    assert hub.downloads[0]["revision"] == "v2"


def test_conversion_of_the_hub_is_found(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    hub.files = {None: PICKLED, "refs/pr/9": PICKLED, "refs/pr/42": SAFE}
    hub.offers = [None, "refs/pr/9", "refs/pr/42"]
    with caplog.at_level(logging.WARNING):
        resolve("facebook/opt-125m")
    assert hub.downloads[0]["revision"] == "refs/pr/42"
    assert "using refs/pr/42 of SFconvertbot" in caplog.text
    assert "model.pretrained: asking the Hugging Face hub for" in caplog.text


def fits(download: dict[str, Any], name: str) -> bool:
    allowed = any(Path(name).match(pattern) for pattern in download["allow_patterns"])
    return allowed and not Path(name).match(download["ignore_patterns"])


@pytest.mark.parametrize("revision", [None, "v2"])
def test_pickles_are_downloaded_where_there_are_no_safetensors(hub: Hub, revision: str | None) -> None:
    shards = ["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"]
    hub.files = {None: PICKLED, "v2": ["config.json", *shards], "refs/pr/9": PICKLED}
    hub.offers = ["refs/pr/9"]
    resolve("org/name", revision)
    (download,) = hub.downloads
    assert download["revision"] == revision
    assert all(fits(download, name) for name in [*PICKLED, *shards])
    assert not any(fits(download, name) for name in ["a.pt", "modeling.py", "tf_model.h5"])


def test_safetensors_in_a_folder_of_a_repository_are_not_the_models(hub: Hub) -> None:
    hub.files = {None: [*PICKLED, "onnx/model.safetensors"]}
    resolve("org/name")
    assert all(fits(hub.downloads[0], name) for name in PICKLED)


def test_a_conversion_is_not_taken_instead_of_the_revision_of_the_user(hub: Hub) -> None:
    hub.files = {None: SAFE, "v2": PICKLED, "refs/pr/9": SAFE}
    hub.offers = ["refs/pr/9"]
    resolve("org/name", "v2")
    assert hub.downloads[0]["revision"] == "v2"


def test_no_weights_at_all(hub: Hub) -> None:
    hub.files = {None: ["config.json", "flax_model.msgpack", "training_args.bin"]}
    refused("org/name has neither safetensors nor pytorch_model.bin on the hub: load it with")


def hub_error(kind: Callable[..., Exception]) -> Exception:
    response: Any = SimpleNamespace(headers={}, request=None)
    return kind("refused", response=response)


class NoRouteError(Exception):
    """Stands for the HTTP library's own class, whose name depends on the hub client's release."""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (GatedRepoError, "is gated: accept its licence at https://huggingface.co/org/name"),
        (RepositoryNotFoundError, "is neither a folder here nor a model on the hub"),
        (RevisionNotFoundError, "model.revision: org/name has no revision 'v2'"),
    ],
)
def test_refusal_of_the_hub_says_what_to_do(hub: Hub, kind: Callable[..., Exception], message: str) -> None:
    hub.error = hub_error(kind)
    refused(message, revision="v2")


@pytest.mark.parametrize("error", [NoRouteError("no route"), OSError("no route")])
def test_no_network(hub: Hub, error: Exception) -> None:
    hub.error = error
    refused(r"cannot be downloaded \(no route\): give model.pretrained a local folder")
    hub.cached = []
    refused("cannot be downloaded")


def snapshot(path: str, files: list[str], refs: set[str], modified: float) -> Any:
    return SimpleNamespace(
        snapshot_path=Path(path),
        files=[SimpleNamespace(file_path=Path(path, name)) for name in files],
        refs=refs,
        commit_hash=f"hash-of-{path}",
        last_modified=modified,
    )


@pytest.mark.parametrize(
    ("revision", "path"), [(None, "converted"), ("v1", "old"), ("hash-of-old", "old"), ("v3", None)]
)
def test_cache_serves_without_network(hub: Hub, revision: str | None, path: str | None) -> None:
    hub.error = NoRouteError("no route")
    snapshots = [
        snapshot("old", SAFE, {"v1"}, 1.0),
        snapshot("converted", SAFE, {"refs/pr/3"}, 2.0),
        snapshot("pickles", PICKLED, {"main"}, 3.0),
    ]
    other = SimpleNamespace(repo_type="model", repo_id="org/other", revisions=[snapshots[0]])
    wanted = SimpleNamespace(repo_type="model", repo_id="org/name", revisions=snapshots)
    hub.cached = [other, wanted]
    if path is None:
        refused("cannot be downloaded", revision=revision)
    else:
        assert resolve("org/name", revision) == Path(path)


def test_cache_with_pickles_only_serves_without_network(hub: Hub) -> None:
    hub.error = NoRouteError("no route")
    snapshots = [
        snapshot("pickles", PICKLED, {"main"}, 3.0),
        snapshot("config", ["config.json"], {"v1"}, 4.0),
    ]
    hub.cached = [SimpleNamespace(repo_type="model", repo_id="org/name", revisions=snapshots)]
    assert resolve("org/name") == Path("pickles")


def test_embedded_models_are_in_the_package(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "embedded" / "opt").mkdir(parents=True)
    (tmp_path / "embedded" / "opt" / "config.json").touch()
    monkeypatch.setattr(source, "files", lambda _: tmp_path)
    assert resolve("embedded:opt") == tmp_path / "embedded" / "opt"
    refused("no model embedded:gpt2: there are embedded:opt", "embedded:gpt2")
    refused("no model embedded:../x", "embedded:../x")
