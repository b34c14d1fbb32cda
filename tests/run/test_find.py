"""All commands find the same run by the same words, and none follows a link in a run."""

import os
from pathlib import Path

import pytest

from aespa_pl.errors import UserError
from aespa_pl.run.find import find_run
from aespa_pl.run.journal import Run
from tests.disks import files, full


def run_of(parent: Path, written: float) -> Path:
    folder = Run.create(parent, {}).folder
    os.utime(folder / "journal.json", (written, written))
    return folder


def test_a_run_is_named_by_its_folder_a_file_in_it_its_name_or_as_the_last(tmp_path: Path) -> None:
    first, second = run_of(tmp_path / "a", 1000), run_of(tmp_path / "a", 2000)
    other = run_of(tmp_path / "b", 3000)
    nowhere = Path("nowhere")
    assert find_run(str(first), nowhere) == first
    assert find_run(str(first / "checkpoints" / "step_9.ckpt"), nowhere) == first
    assert find_run(str(tmp_path / "a"), nowhere) == second
    assert find_run("last", tmp_path) == other
    assert find_run("last", tmp_path, "a") == second
    deeper = run_of(tmp_path / "c" / "d", 4000)  # --output.name c/d
    assert find_run("last", tmp_path) == deeper


def test_a_short_relative_path_leads_to_a_run_with_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path / "a", 1000)
    (run / "blocks").mkdir()
    for folder, given in ((run.parent, run.name), (run, "."), (run / "blocks", ".."), (run.parent, ".")):
        monkeypatch.chdir(folder)
        found = find_run(given, Path("nowhere"))
        assert (found.resolve(), found.parent.name) == (run, "a")
    other = run_of(tmp_path / "b", 2000)
    monkeypatch.chdir(run)
    assert find_run("../../b", Path("nowhere")) == other
    with pytest.raises(UserError, match="misspelt is not the folder of a run"):
        find_run("misspelt", Path("nowhere"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="is not the folder of a run"):
        find_run(".", Path("nowhere"))  # not the last run of any name below it


def test_the_last_run_is_no_smoke_test_unless_its_name_is_given(tmp_path: Path) -> None:
    real, smoke = run_of(tmp_path / "a", 1000), run_of(tmp_path / "a_smoke_test", 2000)
    assert find_run("last", tmp_path) == real
    assert find_run("last", tmp_path, "a_smoke_test") == smoke
    assert find_run(str(tmp_path / "a_smoke_test"), tmp_path) == smoke


def test_without_any_run_the_user_reads_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no run in .*: begin with aespa-pl fit"):
        find_run("last", tmp_path)
    with pytest.raises(UserError, match=r"is not the folder of a run.*give the folder of a run"):
        find_run(str(tmp_path), tmp_path)


@pytest.mark.parametrize("name", ["blocks", "lock", "rewriting", "test.json", "model/config.json"])
def test_a_link_in_a_run_is_not_followed(tmp_path: Path, name: str) -> None:
    run, outside = run_of(tmp_path / "a", 1000), tmp_path / "mine"
    (run / "model").mkdir()
    (run / name).symlink_to(outside)
    with pytest.raises(UserError, match=rf"{name} is a link, .*remove it"):
        find_run(str(run), tmp_path)
    assert not outside.exists()


def test_a_run_whose_journal_cannot_be_written_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match="cannot write to"):
            Run.create(tmp_path / "a", {})
    assert files(tmp_path / "a") == []
