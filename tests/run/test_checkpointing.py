"""Checkpoints come by iterations and time, and are named once they are on the disk."""

import hashlib
import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from aespa_pl.errors import UserError
from aespa_pl.run.checkpointing import JournaledCheckpointIO, checkpoints
from aespa_pl.run.interruption import Interruption
from aespa_pl.run.journal import Run
from aespa_pl.settings import OutputSettings
from tests.disks import files, full, refused
from tests.run.stopping import EVERY_FIVE, LAST, options, whole_block
from tests.walks import walk


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (EVERY_FIVE, [5, 10, 15, 20]),
        (OutputSettings(checkpoint_iterations=None, checkpoint_seconds=1e-9), list(range(1, LAST + 1))),
        (OutputSettings(checkpoint_iterations=None, checkpoint_seconds=3600.0), []),
        (OutputSettings(checkpoint_iterations=7, checkpoint_seconds=3600.0), [7, 14, 21]),
        (OutputSettings(checkpoint_iterations=None, checkpoint_seconds=None), []),
    ],
)
def test_checkpoints_come_by_iterations_and_time(
    output: OutputSettings, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aespa_pl.run.checkpointing.REST", 0)

    class Watch(Callback):
        def __init__(self) -> None:
            self.steps: list[int] = []

        def on_train_batch_start(self, trainer: Trainer, *_: object) -> None:
            self._look()

        def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self._look()

        def _look(self) -> None:
            run = Run.open(tmp_path / "runs" / "version_0")
            if run.checkpoint is not None and run.checkpoint.block == 0:
                file = run.folder / run.checkpoint.file
                self.steps.append(torch.load(file, weights_only=True)["global_step"])
                assert len(list(run.checkpoint_folder(0).iterdir())) == 1  # the older is removed

    watch = Watch()
    walk("opt", tmp_path, options=options(Interruption(), [watch], [], output))
    assert sorted(set(watch.steps)) == expected


def test_saving_takes_a_small_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An iteration takes 1 s and a save 2 s on this clock; 5 s between saves are asked for."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    saved: list[float] = []

    class Slow(Callback):
        def on_train_batch_start(self, *_: object) -> None:
            clock[0] += 1

        def on_save_checkpoint(self, *_: object) -> None:
            saved.append(clock[0])
            clock[0] += 2

    output = OutputSettings(checkpoint_seconds=5.0)
    changes = {"rounding.iterations": 100}
    walk("opt", tmp_path, changes, options=options(Interruption(), [Slow()], [], output))
    between = [b - (a + 2) for a, b in itertools.pairwise(saved)]  # from the end of a save
    assert between[0] == between[1] == 20 * 2
    assert saved[0] == 5


def test_checksum_made_while_writing_is_that_of_the_file(tmp_path: Path) -> None:
    run, portion = Run.create(tmp_path, {}), whole_block(0)
    path = run.checkpoint_folder(0) / "step_1.ckpt"
    content: dict[str, Any] = {"global_step": 1, "a": torch.randn(1000), "b": {"c": 3}}
    JournaledCheckpointIO(run, portion, path.parent).save_checkpoint(content, path)
    assert run.checkpoint is not None
    assert run.checkpoint.checksum == hashlib.sha256(path.read_bytes()).hexdigest()
    assert torch.equal(
        JournaledCheckpointIO(run, portion, path.parent).load_checkpoint(path)["a"], content["a"]
    )


def test_checkpoint_is_named_after_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk fills on the way, the journal keeps the one before, which is still there."""
    run, portion = Run.create(tmp_path, {}), whole_block(0)
    folder = run.checkpoint_folder(0)
    writer = JournaledCheckpointIO(run, portion, folder)
    writer.save_checkpoint({"global_step": 0, "a": 1}, folder / "step_1.ckpt")
    monkeypatch.setattr(torch, "save", full)
    with refused(folder):
        writer.save_checkpoint({"global_step": 0, "a": 2}, folder / "step_2.ckpt")
    assert Run.open(run.folder).checkpoint_to_continue(portion) == folder / "step_1.ckpt"
    assert files(folder) == ["step_1.ckpt"]


def test_checkpoints_count_in_a_relative_folder_behind_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning gives the absolute path, without links."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    monkeypatch.chdir(tmp_path)
    run, portion = Run.create(Path("link"), {}), whole_block(0)
    folder = run.checkpoint_folder(0)
    (callback,) = checkpoints(EVERY_FIVE, folder)
    assert callback.dirpath is not None
    file = Path(callback.dirpath) / "step_5.ckpt"
    assert file.is_absolute()
    JournaledCheckpointIO(run, portion, folder).save_checkpoint({"global_step": 5}, file)
    assert Run.open(run.folder).checkpoint_to_continue(portion) == folder / "step_5.ckpt"


def test_checkpoints_of_interruptions_do_not_pile_up(tmp_path: Path) -> None:
    """Lightning keeps the one that it began from; that of a callback of the user's is no step of ours."""
    run, portion = Run.create(tmp_path, {}), whole_block(0)
    folder = run.checkpoint_folder(0)
    for step in (1, 2):  # in a process of its own each
        writer = JournaledCheckpointIO(run, portion, folder)
        writer.save_checkpoint({"global_step": step}, folder / f"step_{step}-interrupted.ckpt")
        writer.save_checkpoint({"global_step": 9}, folder / "checkpoints" / f"theirs_{step}.ckpt")
    assert run.checkpoint_to_continue(portion) == folder / "step_2-interrupted.ckpt"
    assert files(folder / "checkpoints") == ["theirs_1.ckpt", "theirs_2.ckpt"]
    assert sorted(path.name for path in folder.glob("*.ckpt")) == ["step_2-interrupted.ckpt"]


def test_a_checkpoint_with_objects_is_refused_without_advice_to_trust_it(tmp_path: Path) -> None:
    file = tmp_path / "state.ckpt"
    torch.save({"callbacks": {"Mine": {"path": tmp_path}}}, file)
    storage = JournaledCheckpointIO(Run.create(tmp_path, {}), whole_block(0), tmp_path)
    with pytest.raises(UserError, match="remove it, and the training that it is of begins") as told:
        storage.load_checkpoint(file)
    assert "weights_only" not in str(told.value)


def test_a_checkpoint_that_cannot_be_read_back_is_refused_when_it_is_written(tmp_path: Path) -> None:
    """The state of a user's callback may hold objects, which no resume would read."""
    run, portion = Run.create(tmp_path, {}), whole_block(0)
    folder = run.checkpoint_folder(0)
    content = {"global_step": 1, "callbacks": {"Mine": {"path": Path("a")}}}
    with pytest.raises(UserError, match=r"a callback .* has pathlib\.\w+ in its state, which no run can be"):
        JournaledCheckpointIO(run, portion, folder).save_checkpoint(content, folder / "step_1.ckpt")
    assert Run.open(run.folder).checkpoint is None
    assert not files(folder)
