"""The journal names what is complete, and forgets what is needed no more."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from aespa_pl.run.find import last_run
from aespa_pl.run.folder import Training
from aespa_pl.run.journal import Run
from aespa_pl.run.schema import LearnedFile
from tests.run.journals import RECORD, make_file, note_checkpoint, portion_of, sha


def test_journal_comes_back_as_it_was(run: Run) -> None:
    files = [make_file(run.block_file(3)), make_file(run.model_folder / "shard")]
    run.finish_block(3, RECORD, files)
    make_file(run.model_folder / "config.json")
    run.finish_model()
    run.damping[4] = 0.1
    run.note_portion(portion_of(4), make_file(run.portion_file(portion_of(4))))
    checkpoint = make_file(run.checkpoint_folder(4) / "x.ckpt")
    run.note_checkpoint(portion_of(4, 1), checkpoint)
    again = Run.open(run.folder)
    assert again == run
    assert again.blocks[3].losses == RECORD["losses"]
    assert again.damaged_files(3) == []
    assert again.damage() == ""
    assert again.checkpoint == LearnedFile(
        block=4, key="q_heads_1, k", file="checkpoints/block_004/x.ckpt", checksum=sha(checkpoint)
    )
    assert again.checkpoint_to_continue(portion_of(4, 1)) == checkpoint
    assert again.checkpoint_to_continue(portion_of(4)) is None  # of other heads
    assert again.checkpoint_to_continue(portion_of(3, 1)) is None
    assert again.portion_to_continue(portion_of(4)) == run.portion_file(portion_of(4))


def test_process_that_only_looks_on_leaves_the_folder_as_it_is(run: Run) -> None:
    checkpoint = note_checkpoint(run, 0)
    before = run.journal_file.read_bytes()
    looking = replace(Run.open(run.folder), writes=False)
    looking.damping[0] = 0.1
    looking.finish_block(0, RECORD, [run.folder / "not_there"])
    make_file(run.model_folder / "config.json")
    looking.finish_model()
    assert 0 in looking.blocks
    assert run.journal_file.read_bytes() == before
    assert checkpoint.is_file()


def test_last_run_is_the_one_whose_journal_was_written_last(tmp_path: Path) -> None:
    runs = tmp_path / "mine"
    assert last_run(tmp_path, runs.name) is None
    assert last_run(tmp_path) is None
    for _ in range(11):
        begun = Run.create(runs, {}).folder
    (runs / "version_99").mkdir()
    for journal in runs.glob("*/journal.json"):
        os.utime(journal, (1000, 1000))
    assert begun.name == "version_10"  # not version_9, the last by name
    assert last_run(tmp_path, runs.name) == last_run(tmp_path) == begun
    continued = Run.open(runs / "version_3")
    continued.save()
    assert last_run(tmp_path, runs.name) == last_run(tmp_path) == continued.folder


def test_portion_of_other_heads_is_forgotten_with_all_after_it(run: Run) -> None:
    for number in range(3):
        run.note_portion(portion_of(0, number), make_file(run.portion_file(portion_of(0, number))))
    assert run.portion_to_continue(portion_of(0, 0)) == run.portion_file(portion_of(0, 0))
    other = Training(0, "q_heads_1_to_2", "block_000", 1)
    assert run.portion_to_continue(other) is None
    assert [learned.key for learned in run.portions] == [portion_of(0, 0).key]
    assert run.portion_to_continue(portion_of(0, 2)) is None


METRICS = {
    "perplexity": {"original": {"c4": 12.5, "wiki": 9}},
    "seconds": {"total": 3.5, "grid": 1},
    "peak_bytes": {"host": 7},
    "size": {"quantized": {"bytes": 900, "bits_per_weight": 2.5}},
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
