"""A walk stores what it did, and goes on from it to the same bits."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger

from aespa_pl.run.folder import Training
from aespa_pl.run.journal import Run
from tests.models.examples import make_model
from tests.walk.by_hand import CORRECT, POLISH, Walked
from tests.walk.test_tuning import BLOCKS_ONLY, BOTH
from tests.walks import BLOCKS, SilentTrainers, shortened, walk


def test_what_was_measured_is_in_the_journal(walked: Walked) -> None:
    quantized = walked("opt")
    for index in range(BLOCKS):
        record = quantized.journal["blocks"][str(index)]
        assert record["tuning"] is None  # these settings tune nothing
        for loss in record["losses"].values():
            assert loss.keys() == {
                "nearest", "optq", "final", "share_not_nearest", "extra_damping",
            }  # fmt: skip
        for phase in ("statistics", "grid", "optq", "rounding"):
            assert record["seconds"][phase] > 0
        # nothing runs through the last block once it is quantized
        assert (record["seconds"].get("forward", 0) > 0) == (index < BLOCKS - 1)
        shares = [x["final"] / x["nearest"] for x in record["losses"].values()]
        mean = sum(shares) / len(shares)
        assert f"block {index} of {BLOCKS}: loss {mean:.3f} of nearest" in quantized.said


@pytest.mark.parametrize(
    ("name", "changes"),
    [("llama-grouped", {}), ("opt", CORRECT), ("bloom", CORRECT), ("llama-grouped", CORRECT)],
)
def test_block_after_replay_is_the_same(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """The inputs of block 1 come from the block in memory first, then from its file.

    With correction both streams go through the complete blocks again.
    """
    torch.manual_seed(1)
    model = shortened(make_model(name, torch.float16))  # the file holds less than float32 does
    first = walk(name, tmp_path, changes, model=model)
    tensors, losses = first.file(1), first.losses(1)
    run = Run.open(first.run.folder)
    del run.blocks[1]
    again = walk(name, tmp_path, changes, model=model, run=run)
    assert again.losses(1) == losses
    assert all(torch.equal(tensor, tensors[key]) for key, tensor in again.file(1).items())
    assert "1 of 2 blocks are complete already" in again.said


def test_what_polish_did_is_in_journal_and_printed(walked: Walked) -> None:
    quantized = walked("opt", POLISH)
    for index in range(BLOCKS):
        record = quantized.journal["blocks"][str(index)]
        losses = record["losses"].values()
        for loss in losses:
            assert loss.keys() == {
                "nearest", "optq", "final", "share_not_nearest", "extra_damping",
                "before_polish", "polish_passes", "polish_changed",
            }  # fmt: skip
        assert record["seconds"]["polish"] > 0
        changed = sum(x["polish_changed"] for x in losses)
        passes = max(x["polish_passes"] for x in losses)
        line = f"block {index} of {BLOCKS}: polish changed {changed} integers in {passes} passes; "
        assert line in quantized.said
    assert "polish" not in walked("opt").journal["blocks"]["0"]["seconds"]


class Stop(Callback):
    """Ends the second training."""

    def __init__(self) -> None:
        self.trainings = 0

    def options(self, _run: Run, _training: Training) -> dict[str, Any]:
        return {"callbacks": [self]}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.trainings += 1
        if self.trainings == 2:
            raise InterruptedError


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_after_a_tuning_nothing_of_it_stays_in_memory(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[weakref.ref[LightningModule]] = []
    alive: list[int] = []

    class Watch(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            trained.append(weakref.ref(pl_module))

    free = SilentTrainers.free

    def free_and_count(trainers: SilentTrainers) -> None:
        free(trainers)
        alive.append(sum(module() is not None for module in trained))

    monkeypatch.setattr(SilentTrainers, "free", free_and_count)
    changes = BOTH | {"method": "rtn", "tuning.model.blocks": place}
    walk("opt", tmp_path, changes, tuning_options=lambda _run, _training: {"callbacks": [Watch()]})
    assert len(trained) == BLOCKS + 1
    assert set(alive) == {0}


def test_losses_after_passes_are_drawn_once_for_a_block_that_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def loggers(_trainers: SilentTrainers, _run: Run, curves: str) -> list[CSVLogger]:
        made.append(curves)
        return [CSVLogger(tmp_path, curves)]

    monkeypatch.setattr(SilentTrainers, "loggers", loggers)
    changes = BLOCKS_ONLY | POLISH | {"method": "aespa-fast"}
    with pytest.raises(InterruptedError):
        walk("opt", tmp_path, changes, tuning_options=Stop().options)
    walk("opt", tmp_path, changes, run=Run.open(tmp_path / "runs" / "version_0"))
    assert made == ["block_000", "block_001"]
    assert "loss_after_passes/fc1" in (tmp_path / "block_001/version_0/metrics.csv").read_text()
