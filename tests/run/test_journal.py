"""The journal names what is complete, and refuses what does not belong to it."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aespa_pl.errors import UserError
from aespa_pl.run.fingerprint import MEBIBYTE, differences, model_fingerprint
from aespa_pl.run.journal import FORMAT, DamagedFileError, Run
from aespa_pl.run.versions import last_run

FINGERPRINT = {"model": "a" * 64, "dtype": "float32", "quantization": {"bits": 2, "grid": {"z": 1}}}


def make_file(path: Path, content: str = "content") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path, FINGERPRINT)


def test_journal_comes_back_as_it_was(run: Run) -> None:
    files = [make_file(run.block_file(3)), make_file(run.model_folder / "shard")]
    run.finish_block(3, {"losses": {"q": 1.5}}, files)
    run.damping[4] = 0.1
    run.note_checkpoint(4, make_file(run.checkpoint_folder(4) / "x.ckpt"))
    again = Run.open(run.folder)
    assert again == run
    assert again.blocks[3]["losses"] == {"q": 1.5}
    assert again.damaged(3, files) == []
    assert again.usable_checkpoint(4) == run.checkpoint_folder(4) / "x.ckpt"
    assert again.usable_checkpoint(3) is None


def test_process_that_only_looks_on_leaves_the_folder_as_it_is(run: Run) -> None:
    checkpoint = make_file(run.checkpoint_folder(0) / "x.ckpt")
    run.note_checkpoint(0, checkpoint)
    before = run.journal.read_bytes()
    looking = replace(Run.open(run.folder), writes=False)
    looking.damping[0] = 0.1
    looking.finish_block(0, {"losses": {}}, [run.folder / "not_there"])
    assert 0 in looking.blocks
    assert run.journal.read_bytes() == before
    assert checkpoint.is_file()


def test_version_numbers_are_not_used_again(tmp_path: Path) -> None:
    numbers = [Run.create(tmp_path, {}).folder.name for _ in range(3)]
    assert numbers == ["version_0", "version_1", "version_2"]
    (tmp_path / "version_1" / "journal.json").unlink()
    (tmp_path / "version_1").rmdir()
    (tmp_path / "version_10").mkdir()
    assert Run.create(tmp_path, {}).folder.name == "version_11"


def test_last_run_is_the_newest_with_a_journal(tmp_path: Path) -> None:
    assert last_run(tmp_path) is None
    for _ in range(11):
        newest = Run.create(tmp_path, {}).folder
    (tmp_path / "version_99").mkdir()
    assert newest.name == "version_10"  # not version_9, the last by name
    assert last_run(tmp_path) == newest


def test_run_with_the_same_inputs_goes_on(run: Run) -> None:
    Run.open(run.folder).refuse_changes(FINGERPRINT)


def test_all_that_differs_is_listed(run: Run) -> None:
    now: dict[str, Any] = {
        "model": "b" * 64,
        "dtype": "float32",
        "quantization": {"bits": 3, "grid": {"z": 2}},
        "more": 1,
    }
    with pytest.raises(UserError) as caught:
        Run.open(run.folder).refuse_changes(now)
    assert str(caught.value) == (
        f"{run.folder} cannot be continued, for model was aaaaaaaa... and is bbbbbbbb...; "
        "more was None and is 1; quantization.bits was 2 and is 3; quantization.grid.z was 1 and "
        "is 2: restore these, or start a new run without --ckpt_path"
    )


def test_differences_of_equal_fingerprints_are_none() -> None:
    assert differences(FINGERPRINT, json.loads(json.dumps(FINGERPRINT))) == []
    assert differences({"a": {"b": 1}}, {"a": 1}) == ["a was {'b': 1} and is 1"]
    assert differences({"a": None}, {}) == []


def test_journal_of_a_newer_format_is_refused(run: Run) -> None:
    content = json.loads(run.journal.read_text())
    run.journal.write_text(json.dumps({**content, "format": FORMAT + 1}))
    with pytest.raises(
        UserError, match=r"journal.json was written by a newer .*: update aespa-pl$"
    ):
        Run.open(run.folder)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", "{}", '{"format": 1}', '{"format": "1"}',
     '{"format": 1, "fingerprint": {}, "blocks": [], "checkpoint": null, "damping": {}}',
     '{"format": 1, "fingerprint": {}, "blocks": {"x": {}}, "checkpoint": null, "damping": {}}',
     '{"format": 1, "fingerprint": {}, "blocks": {}, "checkpoint": null, "damping": {"0": "x"}}'],
)  # fmt: skip
def test_damaged_journal_is_refused(content: str, run: Run) -> None:
    run.journal.write_text(content)
    with pytest.raises(UserError, match=r"journal\.json is damaged \(.*\): start a new run$"):
        Run.open(run.folder)


def test_journal_that_is_no_text_is_refused(run: Run) -> None:
    run.journal.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"is damaged"):
        Run.open(run.folder)


def test_folder_without_a_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not the folder of a run: journal.json cannot be read"):
        Run.open(tmp_path)


@pytest.mark.parametrize("damage", ["changed", "shorter", "missing"])
def test_damage_is_found(damage: str, run: Run) -> None:
    block, checkpoint = run.block_file(0), run.checkpoint_folder(1) / "a.ckpt"
    run.finish_block(0, {}, [make_file(block), make_file(run.model_folder / "shard")])
    run.note_checkpoint(1, make_file(checkpoint))
    for file in (block, checkpoint):
        if damage == "missing":
            file.unlink()
        else:
            file.write_text("conTent" if damage == "changed" else "cont")
    assert run.damaged(0, [block, run.model_folder / "shard"]) == [block]
    with pytest.raises(DamagedFileError, match=str(checkpoint)):
        run.usable_checkpoint(1)
    assert run.usable_checkpoint(0) is None


def test_finished_block_needs_its_checkpoints_no_more(run: Run) -> None:
    for index in (0, 1):  # those of block 0: the process was killed before it removed them
        run.note_checkpoint(index, make_file(run.checkpoint_folder(index) / "a.ckpt"))
    make_file(run.checkpoint_folder(1) / "lightning_logs" / "of a user's callback")
    run.finish_block(1, {}, [make_file(run.block_file(1))])
    assert not run.checkpoint_folder(1).parent.exists()
    assert Run.open(run.folder).checkpoint is None


def test_checkpoint_is_named_after_it_is_written(run: Run) -> None:
    with pytest.raises(FileNotFoundError):
        run.note_checkpoint(0, run.checkpoint_folder(0) / "a.ckpt")
    assert Run.open(run.folder).checkpoint is None


@pytest.mark.parametrize("place", ["start", "end", "name", "length"])
def test_model_fingerprint_sees_other_weights(place: str, tmp_path: Path) -> None:
    content = bytearray(3 * MEBIBYTE)
    path = tmp_path / "a"
    path.write_bytes(content)
    before = model_fingerprint([path])
    assert model_fingerprint([path]) == before
    if place == "name":
        path = path.rename(tmp_path / "b")
    else:
        content[0 if place == "start" else -1] = place != "length"
        path.write_bytes(bytes(content) + b"\0" * (place == "length"))
    assert model_fingerprint([path]) != before


def test_model_fingerprint_does_not_depend_on_the_order(tmp_path: Path) -> None:
    paths = [make_file(tmp_path / name, name) for name in "ab"]
    assert model_fingerprint(paths) == model_fingerprint(reversed(paths))
    assert model_fingerprint(paths) != model_fingerprint(paths[:1])


HOLDER = """
import sys
from filelock import FileLock
lock = FileLock(sys.argv[1])  # given back when nothing refers to it
lock.acquire()
print("has it", flush=True)
sys.stdin.read()
"""


def test_lock_keeps_other_processes_off_until_theirs_is_dead(run: Run) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, run.folder / "lock"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "has it\n"
        message = rf"^{run.folder} is in use by another process: wait for it, or start a new run"
        with pytest.raises(UserError, match=message), run.locked():
            pass
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait(timeout=30)
    entered = False
    with run.locked():
        entered = True
    assert entered


def test_lock_is_taken_and_given_back(run: Run) -> None:
    other = Run.open(run.folder)
    in_use = pytest.raises(UserError, match=r"in use by another process")
    with run.locked(), in_use, other.locked():
        pass
    with pytest.raises(KeyError), run.locked():
        raise KeyError
    with other.locked():
        pass
