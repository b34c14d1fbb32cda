"""The journal names what is complete, and refuses what does not belong to it."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aespa_pl.errors import UserError
from aespa_pl.planning.partition import HeadRange, Portion
from aespa_pl.run.damage import refuse_damaged
from aespa_pl.run.fingerprint import MEBIBYTE, differences, model_fingerprint
from aespa_pl.run.journal import Run
from aespa_pl.run.schema import FORMAT, DamagedFileError, LearnedFile
from aespa_pl.run.versions import last_run

FINGERPRINT = {"model": "a" * 64, "dtype": "float32", "quantization": {"bits": 2, "grid": {"z": 1}}}


RECORD = {"losses": {"q": {"final": 1.5, "polish_passes": 2}}, "seconds": {"grid": 3}}


def portion_of(index: int, number: int = 0) -> Portion:
    """Return a portion of a block; those with other numbers have other heads."""
    return Portion(index, number, (HeadRange("q", number, number + 1, 4), HeadRange("k", 0, 2, 2)))


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def note_checkpoint(run: Run, index: int, name: str = "a.ckpt") -> Path:
    """Write a checkpoint of a block, and note it."""
    file = make_file(run.checkpoint_folder(index) / name)
    run.note_checkpoint(portion_of(index), file, sha(file))
    return file


def make_file(path: Path, content: str = "content") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path, FINGERPRINT)


def test_journal_comes_back_as_it_was(run: Run) -> None:
    files = [make_file(run.block_file(3)), make_file(run.model_folder / "shard")]
    run.finish_block(3, RECORD, files)
    make_file(run.model_folder / "config.json")
    run.finish_model()
    run.damping[4] = 0.1
    run.note_portion(portion_of(4), make_file(run.portion_file(portion_of(4))))
    checkpoint = make_file(run.checkpoint_folder(4) / "x.ckpt")
    run.note_checkpoint(portion_of(4, 1), checkpoint, sha(checkpoint))
    again = Run.open(run.folder)
    assert again == run
    assert again.blocks[3]["losses"] == RECORD["losses"]
    assert again.damaged_files(3) == again.all_damaged_files() == []
    assert again.checkpoint == LearnedFile(
        block=4,
        keys=["q_heads_1_to_1", "k"],
        file="checkpoints/block_004/x.ckpt",
        checksum=sha(checkpoint),
    )
    assert again.usable_checkpoint(portion_of(4, 1)) == checkpoint
    assert again.usable_checkpoint(portion_of(4)) is None  # of other heads
    assert again.usable_checkpoint(portion_of(3, 1)) is None
    assert again.usable_portion(portion_of(4)) == run.portion_file(portion_of(4))


def test_process_that_only_looks_on_leaves_the_folder_as_it_is(run: Run) -> None:
    checkpoint = note_checkpoint(run, 0)
    before = run.journal.read_bytes()
    looking = replace(Run.open(run.folder), writes=False)
    looking.damping[0] = 0.1
    looking.finish_block(0, RECORD, [run.folder / "not_there"])
    make_file(run.model_folder / "config.json")
    looking.finish_model()
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
        f"{run.folder} cannot be continued, because model was aaaaaaaa... and is bbbbbbbb...; "
        "more was None and is 1; quantization.bits was 2 and is 3; quantization.grid.z was 1 and "
        "is 2: restore these, or start a new run without --ckpt_path"
    )


def test_differences_of_equal_fingerprints_are_none() -> None:
    assert differences(FINGERPRINT, json.loads(json.dumps(FINGERPRINT))) == []
    assert differences({"a": {"b": 1}}, {"a": 1}) == ["a was {'b': 1} and is 1"]
    assert differences({"a": None}, {}) == []


def test_journal_of_another_format_is_refused(run: Run) -> None:
    content = json.loads(run.journal.read_text())
    for other, age in ((FORMAT + 1, "a newer"), (FORMAT - 1, "an older")):
        run.journal.write_text(json.dumps({"format": other, "more": content}))
        with pytest.raises(
            UserError, match=rf"journal.json was written by {age} version .*: use that"
        ):
            Run.open(run.folder)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "{}", '{"format": "2"}'])
def test_journal_that_is_none_is_refused(content: str, run: Run) -> None:
    run.journal.write_text(content)
    refuse_as_damaged(run)


def refuse_as_damaged(run: Run) -> str:
    """Check that a journal is called damaged in one line; return the reason."""
    with pytest.raises(UserError) as caught:
        Run.open(run.folder)
    message = str(caught.value)
    assert message.startswith(f"{run.journal} is damaged (")
    assert message.endswith("): start a new run")
    assert message.count(str(run.journal)) == 1
    assert len(message.splitlines()) == 1
    return message


LEARNED = {"block": 1, "keys": ["q"], "file": "a", "checksum": "b"}
DAMAGES: list[tuple[str, Any]] = [
    ("fingerprint", None), ("fingerprint", []),
    ("blocks", []), ("blocks", {"x": {**RECORD, "files": {}}}),
    ("blocks.0", {}), ("blocks.0", None), ("blocks.0.losses", {"q": 1.0}),
    ("blocks.0.losses.q.final", "low"), ("blocks.0.losses.q.final", float("nan")),
    ("blocks.0.seconds", None), ("blocks.0.seconds", "3"), ("blocks.0.seconds.grid", "3"),
    ("blocks.0.files", []), ("blocks.0.files", {"a": 1}),
    ("checkpoint", {}), ("checkpoint", "a"), ("checkpoint", {**LEARNED, "block": "1"}),
    ("checkpoint", {**LEARNED, "keys": None}),
    ("portions", {}), ("portions", [{}]), ("portions", ["a"]),
    ("damping", {"0": "x"}), ("damping", []), ("damping", {"x": 0.1}),
    ("model", []), ("model", {"a": 1}),
]  # fmt: skip
MISSING = [
    "fingerprint", "blocks", "checkpoint", "portions", "damping", "model",
    "blocks.0.losses", "blocks.0.seconds", "blocks.0.files",
]  # fmt: skip


def journal_with_a_block(run: Run) -> dict[str, Any]:
    """Return the content of a journal that is not damaged."""
    run.finish_block(0, RECORD, [make_file(run.block_file(0))])
    Run.open(run.folder)
    content: dict[str, Any] = json.loads(run.journal.read_text())
    return content


def inside(content: dict[str, Any], path: str) -> tuple[dict[str, Any], str]:
    """Return the mapping that a dotted path leads to, and the last key."""
    *before, last = path.split(".")
    for key in before:
        content = content[key]
    return content, last


@pytest.mark.parametrize(("path", "value"), DAMAGES)
def test_damaged_value_is_refused(path: str, value: Any, run: Run) -> None:
    content = journal_with_a_block(run)
    where, key = inside(content, path)
    where[key] = value
    run.journal.write_text(json.dumps(content))
    refuse_as_damaged(run)


@pytest.mark.parametrize("path", MISSING)
def test_missing_value_is_refused_by_its_name(path: str, run: Run) -> None:
    content = journal_with_a_block(run)
    where, key = inside(content, path)
    del where[key]
    run.journal.write_text(json.dumps(content))
    assert f"({path}: " in refuse_as_damaged(run)


def test_journal_that_is_no_text_is_refused(run: Run) -> None:
    run.journal.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"is damaged"):
        Run.open(run.folder)


def test_folder_without_a_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not the folder of a run: journal.json cannot be read"):
        Run.open(tmp_path)


def damage_file(file: Path, damage: str) -> None:
    if damage == "missing":
        file.unlink()
    else:
        file.write_text("conTent" if damage == "changed" else "cont")


damages = pytest.mark.parametrize("damage", ["changed", "shorter", "missing"])


@damages
def test_damage_is_found(damage: str, run: Run) -> None:
    block, portion = run.block_file(0), run.portion_file(portion_of(1))
    run.finish_block(0, RECORD, [make_file(block), make_file(run.model_folder / "shard")])
    run.note_portion(portion_of(1), make_file(portion))
    checkpoint = note_checkpoint(run, 1)
    for file in (block, portion, checkpoint):
        damage_file(file, damage)
    assert run.damaged_files(0) == [block]
    with pytest.raises(DamagedFileError, match=f"^{checkpoint}$"):
        run.usable_checkpoint(portion_of(1))
    with pytest.raises(DamagedFileError, match=f"^{portion}$"):
        run.usable_portion(portion_of(1))
    assert run.usable_checkpoint(portion_of(0)) is None


@damages
def test_damage_of_a_finished_model_is_found(damage: str, run: Run) -> None:
    """Damage is found in the blocks and beside them; files that come later don't count."""
    shards = [make_file(run.model_folder / f"shard_{index}") for index in range(2)]
    for index in (1, 0):
        run.finish_block(index, RECORD, [make_file(run.block_file(index)), shards[index]])
    config, stem = (make_file(run.model_folder / "deep" / name) for name in ("config", "stem"))
    run.finish_model()
    make_file(run.model_folder / "a user's")
    again = Run.open(run.folder)
    assert again.model == {"model/deep/config": sha(config), "model/deep/stem": sha(stem)}
    assert again.all_damaged_files() == []
    for file in (shards[1], run.block_file(0), config):
        damage_file(file, damage)
    assert again.damaged_files() == [config]
    assert again.damaged_files(1) == [shards[1]]
    assert again.all_damaged_files() == [run.block_file(0), shards[1], config]


def test_run_without_its_files_names_some_and_how_to_mend_it(run: Run) -> None:
    for name in "abcde":
        make_file(run.model_folder / name)
    run.finish_model()
    refuse_damaged(run)
    (run.model_folder / "b").unlink()
    mend = f"mend it with aespa-pl fit --ckpt_path {run.folder}"
    with pytest.raises(UserError) as caught:
        refuse_damaged(run)
    assert str(caught.value) == (
        f"the run {run.folder} is damaged (model/b is missing or changed): {mend}"
    )
    shutil.rmtree(run.model_folder)
    with pytest.raises(UserError) as caught:
        refuse_damaged(run)
    assert str(caught.value) == (
        f"the run {run.folder} is damaged (model/a, model/b, model/c and 2 more files are missing or "
        f"changed): {mend}"
    )


def test_portion_of_other_heads_is_forgotten_with_all_after_it(run: Run) -> None:
    for number in range(3):
        run.note_portion(portion_of(0, number), make_file(run.portion_file(portion_of(0, number))))
    assert run.usable_portion(portion_of(0, 0)) == run.portion_file(portion_of(0, 0))
    other = Portion(0, 1, (HeadRange("q", 1, 3, 4),))
    assert run.usable_portion(other) is None
    assert [learned.keys for learned in run.portions] == [portion_of(0, 0).keys]
    assert run.usable_portion(portion_of(0, 2)) is None


METRICS = {
    "perplexity": {"original": {"c4": 12.5, "wiki": 9}},
    "seconds": {"total": 3.5, "grid": 1},
    "peak_bytes": {"host": 7},
}


def test_metrics_come_back(run: Run) -> None:
    assert run.metrics() is None
    run.metrics_file.write_text(json.dumps(METRICS))
    assert run.metrics() == METRICS


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", "null", '{"perplexity": {}, "seconds": {}}',
     *(json.dumps({**METRICS, key: []}) for key in METRICS),
     json.dumps({**METRICS, "peak_bytes": {"host": 1.5}}),
     json.dumps({**METRICS, "seconds": {"total": float("nan")}})],
)  # fmt: skip
def test_damaged_metrics_are_none(content: str, run: Run) -> None:
    run.metrics_file.write_text(content)
    assert run.metrics() is None


def test_finished_block_needs_its_checkpoints_no_more(run: Run) -> None:
    for index in (0, 1):  # those of block 0: the process was killed before it removed them
        note_checkpoint(run, index)
    run.note_portion(portion_of(1), make_file(run.portion_file(portion_of(1))))
    make_file(run.checkpoint_folder(1) / "lightning_logs" / "of a user's callback")
    run.finish_block(1, RECORD, [make_file(run.block_file(1))])
    assert not run.checkpoint_folder(1).parent.exists()
    assert not run.portion_file(portion_of(1)).parent.exists()
    again = Run.open(run.folder)
    assert again.checkpoint is None
    assert again.portions == []


def test_learned_portion_needs_its_checkpoints_no_more(run: Run) -> None:
    note_checkpoint(run, 0)
    run.note_portion(portion_of(0), make_file(run.portion_file(portion_of(0))))
    assert not run.checkpoint_folder(0).parent.exists()
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
