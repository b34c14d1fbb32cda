"""The tests of the command line share a model, the command, and runs that are finished."""

from pathlib import Path

import pytest

from aespa_pl.data.texts import EMBEDDED
from tests.api.calls import tiny
from tests.cli.commands import LAST, NO_TEXTS, CommandLine, Done, done, small


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random model and the embedded tokenizer."""
    folder = tmp_path_factory.mktemp("with_cache") / "model"
    tiny().save_pretrained(folder)
    for path in (EMBEDDED / "llama").iterdir():
        if path.name.startswith("tokenizer"):
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture
def aespa(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CommandLine:
    """The command, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return CommandLine()


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A run with the arguments of ``small``."""
    return done(tmp_path_factory.mktemp("finished"), *small(model))


@pytest.fixture(scope="module")
def unmeasured(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A run with ``--ckpt_path last``, though there is none before, and without texts to measure."""
    return done(tmp_path_factory.mktemp("unmeasured"), *small(model), *NO_TEXTS, *LAST)
