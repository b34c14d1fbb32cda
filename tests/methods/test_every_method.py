"""What is true of every method: what is stored, resume with the same bits, several devices."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from aespa_pl.methods import METHODS
from aespa_pl.run.checkpointing import JournaledCheckpointIO
from aespa_pl.run.folder import Training
from aespa_pl.run.journal import Run
from tests.walk import by_hand
from tests.walks import BLOCKS, Quantized, same_files, walk

CHANGES: dict[str, Any] = {
    "bits": 3,
    "rounding.keep_best": None,
    "rounding.iterations": 6,
    "polish.enabled": None,
    "input_correction": None,
    "tuning.blocks.epochs": 2,
    "tuning.blocks.batch_size": 2,
    "tuning.held_back": 0.3,  # 2 of 6 segments: 2 steps an epoch
    "grid.max_rounds": 2,
}


class KilledError(Exception):
    pass


class Kill:
    """Interrupts a walk at an optimizer step, counted over all Trainers, as a signal does."""

    def __init__(self, step: int) -> None:
        self.left = step

    def callback(self, file: Path) -> Callback:
        kill = self

        class Stop(Callback):
            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                kill.left -= 1
                if kill.left == 0:
                    trainer.save_checkpoint(file, weights_only=False)
                    raise KilledError

        return Stop()

    def options(self, run: Run, training: Training) -> dict[str, Any]:
        file = run.checkpoint_folder(training.block) / "x.ckpt"
        plugins = [JournaledCheckpointIO(run, training, file.parent)]
        return {"callbacks": [self.callback(file)], "plugins": plugins}


def check_export(found: Quantized, *, symmetric: bool) -> None:
    """Check that the model folder has the weights that integers and grids of the block files stand for."""
    by_hand.check_export(found, bits=3)
    for index in range(BLOCKS):
        zeros = [t for name, t in found.file(index).items() if name.endswith(".zero_point")]
        assert all(bool((zero == 4).all()) == symmetric for zero in zeros)
    with torch.no_grad():
        assert bool(found.exported()(found.ids).logits.isfinite().all())


@pytest.mark.parametrize("method", METHODS)
def test_symmetric_grids_of_groups_are_exported_as_they_are(method: str, tmp_path: Path) -> None:
    name = "llama-grouped" if METHODS[method].tune_blocks else "bloom"
    changes = CHANGES | {"method": method, "group_size": 4, "symmetric": True}
    found = walk(name, tmp_path, changes)
    check_export(found, symmetric=True)
    losses = [x for i in range(BLOCKS) for x in found.losses(i).values()]
    moved = any(x["final"] != x["nearest"] for x in losses)
    steps = METHODS[method]
    assert moved == (steps.optq or steps.learn != "none" or steps.polish)


def interrupted(method: str, step: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Quantized:
    """Return what a run finds that was killed at a step, or after its first block where none is made."""
    kill = Kill(step)
    run = Run.create(folder / "runs", {})
    changes = CHANGES | {"method": method, "group_size": 4}

    def killed_after_block(self: Run, index: int, *arguments: Any) -> None:
        finish(self, index, *arguments)
        if index == 0 and step == 0:
            raise KilledError

    finish = Run.finish_block
    with monkeypatch.context() as patch:
        patch.setattr(Run, "finish_block", killed_after_block)
        with pytest.raises(KilledError):
            walk("opt", folder, changes, run=run, options=kill.options, tuning_options=kill.options)
    again = Run.open(run.folder)
    assert (again.checkpoint is not None) == (step > 0)
    return walk("opt", folder, changes, run=again)


STEPS = {"rtn": 0, "brecq": 7, "omniquant": 3, "affinequant": 3}
"""Steps at which runs are killed: in the second epoch, or in that of the second unit. One without steps, and
with one stream of hidden states, is killed after its first block. tests/run kills the other methods."""


@pytest.mark.parametrize("method", STEPS)
def test_a_killed_run_goes_on_to_the_same_bits(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = walk("opt", tmp_path / "whole", CHANGES | {"method": method, "group_size": 4})
    check_export(whole, symmetric=False)
    found = interrupted(method, STEPS[method], tmp_path / "killed", monkeypatch)
    same_files(found, whole)
    state = found.exported().state_dict()
    expected = whole.exported().state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_brecq_learns_the_attention_before_the_feed_forward_network(tmp_path: Path) -> None:
    """Targets are the original's own hidden states, seen by transformers' modules."""
    trained: list[tuple[list[str], Tensor]] = []

    class Note(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            names = [n for n, p in pl_module.module.named_parameters() if p.requires_grad]
            pairs = trainer.datamodule.pairs
            targets = torch.stack([pairs[i][1] for i in range(len(pairs))])
            trained.append((sorted({n.split(".parametrizations")[0] for n in names}), targets))

    found = walk(
        "opt",
        tmp_path,
        CHANGES | {"method": "brecq"},
        tuning_options=lambda _run, _portion: {"callbacks": [Note()]},
    )
    attention = sorted(f"self_attn.{n}_proj" for n in ("q", "k", "v", "out"))
    assert [names for names, _ in trained] == [attention, ["fc1", "fc2"]] * BLOCKS
    seen: list[Tensor] = []

    def keep(_module: nn.Module, arguments: Any, *_: Any) -> None:
        seen.append(arguments[0].clone())

    for block in found.original.get_submodule(found.blocks_path):
        block.get_submodule("final_layer_norm").register_forward_pre_hook(keep)
        block.register_forward_hook(lambda _m, _a, out: seen.append(out.clone()))
    with torch.no_grad():
        found.original(found.ids)
    for (_, targets), expected in zip(trained, seen, strict=True):
        torch.testing.assert_close(targets, expected.view_as(targets), rtol=1e-4, atol=1e-5)
