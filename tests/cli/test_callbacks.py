"""Loggers and callbacks that the user names see the learning of each block, and may end it."""

import json
import re
from pathlib import Path

import pytest
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from aespa_pl import QuantizedRun, UserError
from tests.cli.commands import LAST, NO_TEXTS, CommandLine, small
from tests.forks import Forks


def test_loggers_of_the_user_have_the_names_of_run_and_block(aespa: CommandLine, model: Path) -> None:
    words = (
        *small(model), *NO_TEXTS, "--output.name", "mine", "--trainer.logger", "CSVLogger",
        "--trainer.logger.save_dir", "csv", "--trainer.callbacks", "LearningRateMonitor",
    )  # fmt: skip
    assert aespa("fit", *words)[::2] == (0, "")
    for block in ("block_000", "block_001"):
        lines = Path("csv", "mine", "version_0", block, "metrics.csv").read_text().splitlines()
        assert "lr-Adam" in lines[0]
        assert len(lines) > 2
    walk = Path("csv", "mine", "version_0", "walk", "metrics.csv").read_text().splitlines()
    assert len(walk) > 2
    Path("lightning_logs/mine/version_0/metrics.json").unlink()
    assert aespa("fit", *words, *LAST)[::2] == (0, "")
    assert Path("csv", "mine", "version_0", "walk", "metrics.csv").read_text().splitlines() == walk


def test_a_logger_that_takes_no_name_is_refused(aespa: CommandLine, model: Path) -> None:
    chosen = ("--trainer.logger", "lightning.pytorch.loggers.logger.DummyLogger")
    status, out, err = aespa("fit", *small(model), *chosen)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "trainer.logger is DummyLogger, which can't be given the name of each block" in err


def test_profiler_prints_its_table(model: Path, forks: Forks, tmp_path: Path) -> None:
    runs = ("--output.folder", tmp_path, "--trainer.profiler", "simple")
    outcome = forks.run([str(word) for word in ("fit", *small(model), *NO_TEXTS, *runs)])
    assert outcome.status == 0
    assert outcome.text.count("Profiler Report") == 2


def test_fast_dev_run_is_a_smoke_test(aespa: CommandLine, model: Path) -> None:
    words = ("fit", *small(model), "--trainer.fast_dev_run", "true")
    # as in the configurations of large models; a smoke test has too few segments for such a mini-batch
    words += ("--quantization.tuning.model.batch_size", 8, "--quantization.method")
    for method in ("aespa", "aespa-tuned"):
        status, out, err = aespa(*words, method)
        assert (status, err) == (0, "")
        assert out.startswith("smoke test")
        assert "tokens are few" not in " ".join(out.split())  # it has as few as a smoke test takes
        run = Path(out.splitlines()[-1])
        assert run.parent.name == "aespa_smoke_test"
        saved = yaml.safe_load((run / "config.yaml").read_text())
        assert saved["quantization"]["rounding"]["iterations"] <= 10
        assert saved["quantization"]["tuning"]["blocks"]["epochs"] == 1
        assert list(json.loads((run / "journal.json").read_text())["blocks"]) == ["0"]
        assert not (run / "metrics.json").exists()
    for others in (("test", "--ckpt_path", run), ("export", run, "--format", "hf")):
        status, out, err = aespa(*others)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert re.search(
            r"is a smoke test \(trainer\.fast_dev_run\), which has no model: run fit without", err
        )
    with pytest.raises(UserError, match="is a smoke test"):
        QuantizedRun(run, {}).model()
    status, _, err = aespa("test", *LAST)
    assert (status, "there is no run in lightning_logs" in err) == (2, True)


def test_a_smoke_test_does_not_go_on_with_the_run_of_its_name(aespa: CommandLine, model: Path) -> None:
    words = ("fit", *small(model), *NO_TEXTS, "--quantization.method", "rtn")
    assert aespa(*words)[0] == 0
    status, out, err = aespa(*words, "--trainer.fast_dev_run", "true", *LAST)
    assert (status, err) == (0, "")
    assert Path(out.splitlines()[-1]).parent.name == "aespa_smoke_test"


def test_callback_that_ends_the_learning_is_named(aespa: CommandLine, model: Path) -> None:
    timer = ["--trainer.callbacks", "Timer", "--trainer.callbacks.duration", '{"microseconds": 1}']
    arguments = (*small(model), *NO_TEXTS)
    status, _, err = aespa("fit", *arguments, *timer, "--trainer.callbacks.interval", "step")
    assert (status, err.count("\n")) == (2, 1)
    assert re.search(
        r"block 0: learning ended after 1 of 10 iterations.*\(Timer\): remove .*--ckpt_path", err
    )
    assert aespa("fit", *arguments, *LAST)[0] == 0


TUNED = (
    "--quantization.method", "aespa-fast", "--quantization.tuning.blocks.enabled", "true",
    "--quantization.tuning.blocks.epochs", 2, "--quantization.tuning.held_back", 0.3,
    "--quantization.tuning.blocks.batch_size", 1,
)  # fmt: skip


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (
            ("Timer", "--trainer.callbacks.duration", '{"microseconds": 1}',
             "--trainer.callbacks.interval", "step"),
            "tuning ended after 1 of 4 iterations, so one of trainer.callbacks ended it (Timer)",
        ),
        (
            ("ModelCheckpoint", "--trainer.callbacks.monitor", "loss"),
            "has ModelCheckpoint, whose monitor is loss, which this training does not log: expected one of "
            "epoch, step, tuning/held_back_error, tuning/training_error",
        ),
    ],
    ids=["timer", "monitor"],
)  # fmt: skip
def test_callback_that_a_tuning_cannot_go_with_is_named(
    callback: tuple[str, ...], message: str, aespa: CommandLine, model: Path
) -> None:
    status, _, err = aespa("fit", *small(model), *NO_TEXTS, *TUNED, "--trainer.callbacks", *callback)
    assert (status, err.count("\n")) == (2, 1)
    assert message in err


def test_early_stopping_may_end_the_learning(
    aespa: CommandLine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No decrease is large enough: the second epoch, here of 10 iterations, is the last."""
    monkeypatch.setattr("aespa_pl.rounding.EPOCH", 10)
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
    # Lightning counts from 0
    assert events.Scalars("loss_reconstruction/q_proj")[-1].step == 19


def test_early_stopping_on_what_is_not_logged_is_refused(aespa: CommandLine, model: Path) -> None:
    monitor = "loss_reconstruction/other"
    stopping = ("--trainer.callbacks", "EarlyStopping", "--trainer.callbacks.monitor", monitor)
    on_epochs = ("--trainer.callbacks.check_on_train_epoch_end", "true")
    status, _, err = aespa("fit", *small(model), *NO_TEXTS, *stopping, *on_epochs)
    assert (status, err.count("\n")) == (2, 1)
    assert f"has EarlyStopping, whose monitor is {monitor}, which this training does not log" in err


def test_checkpoints_of_the_user_stay_where_there_is_no_logger(aespa: CommandLine, model: Path) -> None:
    words = ("--trainer.logger", "false", "--trainer.callbacks", "ModelCheckpoint")
    status, out, err = aespa("fit", *small(model), *NO_TEXTS, *words)
    assert (status, err) == (0, "")
    assert len(list(Path(out.splitlines()[-1], "checkpoints").glob("*.ckpt"))) == 2  # of two blocks


class FailingAtItsEnd(CSVLogger):
    def finalize(self, status: str) -> None:
        raise ConnectionError("the server of curves is gone")


def test_a_logger_that_fails_at_its_end_costs_a_warning(
    aespa: CommandLine, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = ("--trainer.logger", f"{__name__}.FailingAtItsEnd", "--trainer.logger.save_dir", "csv")
    status, out, err = aespa("fit", *small(model), *NO_TEXTS, *chosen)
    assert (status, err) == (0, "")
    assert (Path(out.splitlines()[-1]) / "metrics.json").is_file()
    said = [m for m in caplog.messages if "the server of curves is gone" in m]
    assert len(said) == 5  # of two blocks, of the passes of the descent in each, and of the walk


class Unmade(Callback):
    def __init__(self) -> None:
        raise RuntimeError("the reason of the callback")


def test_a_callback_that_cannot_be_made_keeps_its_reason(aespa: CommandLine, model: Path) -> None:
    status, _, err = aespa("fit", *small(model), "--trainer.callbacks", f"{__name__}.Unmade")
    assert (status, err) == (2, "aespa-pl: trainer: the reason of the callback\n")
