"""Loggers and callbacks that the user names see the learning of each block, and may end it."""

import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.cli.commands import LAST, NO_TEXTS, CommandLine, small


def test_loggers_and_callbacks_of_the_user_are_made_for_each_block(
    aespa: CommandLine, model: Path
) -> None:
    status, _, err = aespa(
        "fit", *small(model), *NO_TEXTS, "--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", "csv",
        "--trainer.callbacks", "LearningRateMonitor",
    )  # fmt: skip
    assert (status, err) == (0, "")
    for version in ("version_0", "version_1"):
        lines = Path("csv", "lightning_logs", version, "metrics.csv").read_text().splitlines()
        assert "lr-Adam" in lines[0]
        assert len(lines) > 2


def test_callback_that_ends_the_learning_is_named(aespa: CommandLine, model: Path) -> None:
    timer = ["--trainer.callbacks", "Timer", "--trainer.callbacks.duration", '{"microseconds": 1}']
    arguments = (*small(model), *NO_TEXTS)
    status, _, err = aespa("fit", *arguments, *timer, "--trainer.callbacks.interval", "step")
    assert (status, err.count("\n")) == (2, 1)
    assert re.search(
        r"block 0: learning ended after 1 of 10 iterations.*\(Timer\): remove .*--ckpt_path", err
    )
    assert aespa("fit", *arguments, *LAST)[0] == 0


def test_early_stopping_may_end_the_learning(
    aespa: CommandLine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No decrease is large enough: the second epoch, here of 10 iterations, is the last."""
    monkeypatch.setattr("aespa_pl.rounding.data.EPOCH", 10)
    stopping = (
        "--trainer.callbacks", "EarlyStopping", "--trainer.callbacks.monitor", "loss",
        "--trainer.callbacks.patience", 1, "--trainer.callbacks.min_delta", 1e9,
        "--trainer.callbacks.check_on_train_epoch_end", "true",
    )  # fmt: skip
    iterations = ("--quantization.rounding.iterations", 25)
    status, out, err = aespa("fit", *small(model), *NO_TEXTS, *iterations, *stopping)
    assert (status, err) == (0, "")
    events = EventAccumulator(str(Path(out.splitlines()[-1], "block_001")))
    events.Reload()
    assert events.Scalars("loss_reconstruction/q_proj")[-1].step == 20
