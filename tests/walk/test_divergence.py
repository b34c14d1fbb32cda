"""Numbers that overflow, diverge or cannot be factored are told by block, and damping is raised once."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from transformers import PreTrainedModel

from aespa_pl.errors import NumericalError, UserError
from aespa_pl.run.folder import Training
from aespa_pl.run.journal import Run
from tests.models.examples import VOCABULARY, make_model
from tests.walk.by_hand import NOT_LEARNED, Walked, differing
from tests.walks import BLOCKS, shortened, walk


def overflowing(index: int) -> PreTrainedModel:
    """Return a model whose feed-forward overflows in one block; each weight is a finite number."""
    torch.manual_seed(0)
    model = shortened(make_model("opt", torch.float32))
    model.get_submodule(f"model.decoder.layers.{index}.fc1").weight.mul_(1e30)
    return model


@pytest.mark.parametrize("index", [0, 1])
def test_activations_that_overflow_are_refused_by_block(index: int, tmp_path: Path) -> None:
    message = rf"^block {index}: the statistic H of mlp_hidden has NaN or infinite .*float32"
    with pytest.raises(UserError, match=message):
        walk("opt", tmp_path, model=overflowing(index))
    assert len(Run.open(tmp_path / "runs" / "version_0").blocks) == index


class Poison(Callback):
    """Makes the rounding variables of a projection NaN in the first ``times`` trainings."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.trainings = 0

    def options(self, _run: Run, _training: Training) -> dict[str, Any]:
        return {"callbacks": [self]}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.trainings += 1
        if self.trainings <= self.times:
            dict(pl_module.named_parameters())["projections.fc1.variables"].data.fill_(torch.nan)


def test_block_that_diverges_is_done_again_with_more_damping(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, walked: Walked
) -> None:
    poison = Poison(times=1)
    with caplog.at_level(logging.WARNING):
        quantized = walk("opt", tmp_path, options=poison.options)
    assert poison.trainings == BLOCKS + 1
    assert "block 0: the loss of fc1 is not finite; again with 10 times the damping" in caplog.messages
    assert quantized.journal["damping"] == {"0": 0.1}
    more = walked("opt", {"damping": 0.1})
    assert not differing(quantized, more)
    # the losses are those of the setting's damping all the same
    assert quantized.losses(0)["fc1"]["nearest"] < 0.99 * more.losses(0)["fc1"]["nearest"]
    assert quantized.losses(0)["fc1"]["optq"] < 0.99 * more.losses(0)["fc1"]["optq"]
    # the blocks to come have the setting's damping again: block 1 differs from a walk with damping 0.1
    assert differing(quantized, walked("opt", {"damping": 0.1}), 1)


def test_block_that_diverges_twice_is_refused(tmp_path: Path) -> None:
    poison = Poison(times=9)
    message = "^block 0: the loss of fc1 is not finite; check .* another quantization.damping in a new run$"
    with pytest.raises(UserError, match=message):
        walk("opt", tmp_path, options=poison.options)
    assert poison.trainings == 2
    run = Run.open(tmp_path / "runs" / "version_0")
    with pytest.raises(UserError, match=message):  # continued: not with 100 times the damping
        walk("opt", tmp_path, options=poison.options, run=run)
    assert poison.trainings == 3


def test_learning_rate_without_bound_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^block 0: the loss of \w+ is not finite; check"):
        walk("opt", tmp_path, {"rounding.learning_rate": 1e39, "rounding.keep_best": False})


def test_damping_that_a_factorization_needed_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, walked: Walked
) -> None:
    """One word over and over: the Hessians of the first block have rank 1."""
    ids = torch.full((2, 3), VOCABULARY // 2)
    with caplog.at_level(logging.WARNING):
        quantized = walk("llama", tmp_path, {**NOT_LEARNED, "damping": 1e-12}, ids=ids)
    needed = {k: v["extra_damping"] for k, v in quantized.losses(0).items() if v["extra_damping"]}
    assert "q_proj" in needed
    for name, share in needed.items():
        line = f"block 0, {name}: the update needed {share:g} of the Hessian's mean diagonal"
        assert any(message.startswith(line) for message in caplog.messages)
    assert all(v["extra_damping"] == 0 for v in walked("llama").losses(0).values())


def test_hessian_that_cannot_be_factored_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise NumericalError("no factor")

    monkeypatch.setattr("aespa_pl.block.integers.update_weights", fail)
    with pytest.raises(
        UserError, match=r"^block 0, q_proj: no factor; check .* try another quantization\.damping"
    ):
        walk("opt", tmp_path)
