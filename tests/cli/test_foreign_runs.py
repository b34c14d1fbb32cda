"""A run from somebody else is data: what it names runs, and is written to, only if the user confirms it."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from aespa_pl.cli import stop
from aespa_pl.commands.arguments import Arguments, with_run
from aespa_pl.commands.keys import refuse_mistakes
from aespa_pl.errors import UserError
from aespa_pl.run.stored_settings import stored_settings
from tests.cli.commands import LAST, CommandLine, Done, small
from tests.edited import edited

FOREIGN = [
    {"trainer": {"callbacks": [{"class_path": "foreign.Callback"}]}},
    {"trainer": {"callbacks": "foreign.Callback"}},
    {"trainer": {"logger": {"class_path": "foreign.Logger", "init_args": {"a": 1}}}},
    {"trainer": {"plugins": ["foreign.Plugin"]}},
    {"trainer": {"strategy": "foreign.Strategy"}},
    {"trainer": {"default_root_dir": "/elsewhere"}},
    {"trainer": "other.yaml"},
    {"data": "other.yaml"},
    {"data": "{cache: /elsewhere}"},
    {"trainer": {"callbacks": [{
        "class_path": "ModelCheckpoint", "init_args": {"dirpath": "/elsewhere"}
    }]}},
    {"data": {"cache": "/elsewhere"}},
    {"data": {"cache+": "/elsewhere"}},
    {"data.cache": "/elsewhere"},
    {"config": "other.yaml"},
]  # fmt: skip


def foreign(folder: Path, content: dict[str, object]) -> Path:
    """Write the folder of a run of somebody else's."""
    (folder / "version_0").mkdir(parents=True)
    (folder / "version_0" / "journal.json").write_text("{}")
    (folder / "version_0" / "config.yaml").write_text(yaml.safe_dump(content))
    return folder / "version_0"


@pytest.mark.parametrize("content", FOREIGN, ids=json.dumps)
def test_code_and_places_of_a_run_are_taken_only_where_the_user_confirms(
    tmp_path: Path, content: dict[str, object]
) -> None:
    run = foreign(tmp_path / "a", content)
    words = ["--ckpt_path", str(run)]
    for command in ("fit", "test", "plan"):
        with pytest.raises(UserError, match=r"names code to run or places.*--trust_run true"):
            with_run(Arguments.read(words), command)
    trusted = with_run(Arguments.read([*words, "--trust_run", "true"]), "fit")
    assert trusted.last("config") == str(run / "config.yaml")
    assert trusted.last("trust_run") is None  # no key of the settings
    with pytest.raises(UserError, match="names code"):
        with_run(Arguments.read([*words, "--trust_run", "false"]), "fit")
    mine = tmp_path / "mine.yaml"
    mine.touch()
    own = with_run(Arguments.read([*words, "--config", str(mine)]), "fit")
    assert own.last("config") == str(mine)


def test_a_run_of_data_alone_needs_no_confirmation(tmp_path: Path) -> None:
    content = {
        "model": {"pretrained": "embedded:opt"},
        "data": {"cache": None, "calibration": {"source": "embedded"}},
        "trainer": {"devices": [0, 1], "logger": True, "callbacks": None, "accelerator": "cpu"},
    }
    run = foreign(tmp_path / "a", content)
    assert with_run(Arguments.read(["--ckpt_path", str(run)]), "fit").last("config")


def test_a_run_that_this_user_has_made_needs_no_confirmation_but_a_changed_one_does(
    aespa: CommandLine, finished: Done
) -> None:
    """It names a cache; ``finished`` was made here."""
    run = finished.copied("mine")
    assert aespa("fit", "--ckpt_path", run)[0] == 0
    with edited(run / "config.yaml") as content:
        content["trainer"]["callbacks"] = [{"class_path": "foreign.Callback"}]
    status, _, err = aespa("fit", "--ckpt_path", run)
    assert (status, err.count("\n")) == (2, 1)
    assert "names code to run or places to write to (data.cache, trainer.callbacks)" in err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"quantization": {"bitz": 2}}, "quantization.bitz is unknown: did you mean quantization.bits?"),
        ({"model": None}, "model is a section, not a value"),
    ],
)
def test_a_mistake_in_a_configuration_is_named_as_one(
    tmp_path: Path, content: dict[str, object], words: str
) -> None:
    run = foreign(tmp_path / "a", content)
    given = with_run(Arguments.read(["--ckpt_path", str(run)]), "test")
    with pytest.raises(UserError, match=re.escape(words)):
        refuse_mistakes(given, "test")


@pytest.mark.parametrize("empty", [False, True])
def test_a_run_without_its_configuration_says_so_and_gets_it_again(
    aespa: CommandLine, model: Path, finished: Done, *, empty: bool
) -> None:
    file = finished.copied() / "config.yaml"
    before = file.read_text()
    file.unlink()
    if empty:
        file.touch()
    status, _, err = aespa("test", "--ckpt_path", file.parent)
    assert (status, err.count("\n")) == (2, 1)
    assert re.search(r"config\.yaml (cannot be read: No such file|is empty).*: restore it, or give the", err)
    status, out, err = aespa("fit", *small(model), *LAST)
    assert status == 0, err
    assert "config.yaml was missing or damaged: it is made again" in " ".join((out + err).split())
    assert yaml.safe_load(file.read_text())["quantization"] == yaml.safe_load(before)["quantization"]
    assert aespa("test", "--ckpt_path", file.parent)[0] == 0


@pytest.mark.parametrize(
    ("content", "words"), [("x: [", "while parsing a flow node"), ("- 1", "it has no sections")]
)
def test_a_damaged_configuration_of_a_run_is_said_in_words(tmp_path: Path, content: str, words: str) -> None:
    run = foreign(tmp_path / "a", {})
    (run / "config.yaml").write_text(content)
    with pytest.raises(UserError, match=r": restore it, or give the run's configuration with --config$"):
        with_run(Arguments.read(["--ckpt_path", str(run)]), "fit")
    with pytest.raises(UserError, match=rf"cannot be read \({words}.*\): restore it, or copy") as refused:
        stored_settings(run, {})
    assert "Error" not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_names_no_tasks(tmp_path: Path) -> None:
    """A task file runs the functions that it names."""
    run = foreign(tmp_path / "a", {"model": {"pretrained": "m"}, "tasks": ["evil.yaml"]})
    for words in (["--ckpt_path", str(run), "--trust_run"], ["--config", str(run / "config.yaml")]):
        given = with_run(Arguments.read(words), "test")
        with pytest.raises(UserError, match=r"tasks is a key of aespa-pl test alone, on its command"):
            refuse_mistakes(given, "test")


def test_no_command_writes_through_a_link_in_a_run(aespa: CommandLine, finished: Done) -> None:
    run, outside = finished.copied("mine"), Path("outside").absolute()
    shutil.copytree(run / "blocks", outside)
    before = {path.name: path.stat().st_mtime_ns for path in outside.iterdir()}
    shutil.rmtree(run / "blocks")
    (run / "blocks").symlink_to(outside)
    for words in (
        ("fit", "--ckpt_path", run), ("test", "--ckpt_path", run), ("report", run),
        ("export", run, "--format", "hf"),
    ):  # fmt: skip
        status, _, err = aespa(*words)
        assert (status, err.count("\n")) == (2, 1)
        assert "blocks is a link" in err
    assert {path.name: path.stat().st_mtime_ns for path in outside.iterdir()} == before


def test_a_message_acts_on_no_terminal_and_has_an_end(capsys: pytest.CaptureFixture[str]) -> None:
    name = "\x1b[2J\x07\u202e" + "x" * 5000
    with pytest.raises(SystemExit):
        stop(f"{name} is no <object at 0x7f00deadbeef>\nat all", 2)
    said = capsys.readouterr().err
    assert said.endswith("xxx is no <object>" + " at all\n")
    assert said.startswith(r"aespa-pl: \x1b[2J\x07\u202exxx")
    assert len(said) < 400
