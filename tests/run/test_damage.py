"""Files that are changed, shorter or missing are found by the journal."""

import shutil
from pathlib import Path

import pytest

from aespa_pl.errors import UserError
from aespa_pl.run.journal import Run
from tests.run.journals import RECORD, make_file, note_checkpoint, portion_of, sha


def damage_file(file: Path, damage: str) -> None:
    if damage == "missing":
        file.unlink()
    else:
        file.write_text("conTent" if damage == "changed" else "cont")


damages = pytest.mark.parametrize("damage", ["changed", "shorter", "missing"])


@damages
def test_damage_is_found(damage: str, run: Run, caplog: pytest.LogCaptureFixture) -> None:
    block, portion = run.block_file(0), run.portion_file(portion_of(1))
    run.finish_block(0, RECORD, [make_file(block), make_file(run.model_folder / "shard")])
    run.note_portion(portion_of(1), make_file(portion))
    checkpoint = note_checkpoint(run, 1)
    for file in (block, portion, checkpoint):
        damage_file(file, damage)
    assert run.damaged_files(0) == [block]
    assert run.checkpoint_to_continue(portion_of(0)) is None
    assert run.checkpoint is not None  # it is another block's
    assert run.checkpoint_to_continue(portion_of(1)) is None
    assert run.portion_to_continue(portion_of(1)) is None
    assert [file in caplog.text for file in map(str, (checkpoint, portion))] == [True, True]
    assert (run.checkpoint, run.portions) == (None, [])


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
    assert again.damage() == ""
    for file in (shards[1], run.block_file(0), config):
        damage_file(file, damage)
    assert again.damaged_files() == [config]
    assert again.damaged_files(1) == [shards[1]]
    assert again.damage() == "missing or changed: blocks/block_000.safetensors and 2 more"


def test_run_without_its_files_names_some_and_how_to_mend_it(run: Run) -> None:
    for name in "abcde":
        make_file(run.model_folder / name)
    run.finish_model()
    run.refuse_damaged()
    (run.model_folder / "b").unlink()
    mend = f"mend it with aespa-pl fit --ckpt_path {run.folder}"
    with pytest.raises(UserError) as caught:
        run.refuse_damaged()
    assert str(caught.value) == (f"the run {run.folder} is damaged (missing or changed: model/b): {mend}")
    shutil.rmtree(run.model_folder)
    with pytest.raises(UserError) as caught:
        run.refuse_damaged()
    assert str(caught.value) == (
        f"the run {run.folder} is damaged (missing or changed: model/a and 4 more): {mend}"
    )
