"""The command ``plan`` needs no weights, and refuses what ``fit`` refuses."""

import re
from pathlib import Path

import pytest

from aespa_pl.commands import application
from aespa_pl.planning import budget
from tests.cli.commands import LENGTH, ROOT, CommandLine
from tests.disks import leave_free


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "MEASURING_SECONDS", 0.1)


def test_plan_needs_the_configuration_alone(aespa: CommandLine, model: Path) -> None:
    Path("bare").mkdir()
    Path("bare/config.json").write_bytes((model / "config.json").read_bytes())
    status, out, err = aespa(
        "plan", "--config", ROOT / "configs/llama30b_w2.yaml", "--model.pretrained", "bare",
        "--data.calibration.segment_length", LENGTH, "--trainer.accelerator", "cpu",
    )  # fmt: skip
    assert (status, err) == (0, "")
    for word in ("device memory", "host memory", "disk", "time", "2 blocks"):
        assert word in out
    assert not Path("lightning_logs").exists()
    status, _, err = aespa("plan", "--model.pretrained", "nowhere/")
    assert (status, err.count("\n")) == (2, 1)


def test_plan_refuses_what_fit_refuses_and_says_what_is_too_little(
    aespa: CommandLine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["plan", "--model.pretrained", model, "--trainer.accelerator", "cpu"]
    status, _, err = aespa(*words)
    assert status == 2
    assert "segment_length is 2048 (the default), but" in err
    words += ["--data.calibration.segment_length", LENGTH]
    status, _, err = aespa(*words, "--quantization.group_size", 7)
    assert status == 2
    assert "group_size is 7, but" in err
    assert "too little" not in aespa(*words)[1]
    leave_free(monkeypatch, 1000)
    out = " ".join(aespa(*words)[1].split())
    assert re.search(r"too little here: disk: 1\.0 KB are free here, [\d.]+ KB are needed", out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trainer.max_epochs", 3], r"trainer\.max_epochs is decided by the walk"),
        (["--trainer", "section.yaml"], r"trainer\.max_steps is decided by the walk"),
        (["--trainer.devises", 2], r"trainer\.devises is unknown: did you mean trainer\.devices\?$"),
        (["--trainer.precision", "bf16-true"], r"trainer\.precision is bf16-true.*model\.dtype"),
        (["--trainer.accelerator", "abacus"], r"trainer: .*accelerator"),
        (["--trainer.devices", 2, "--trainer.strategy", "fsdp"], r"trainer"),
        (["--trainer.devices", 64], r"make 64 devices, but 128 segments"),
        (
            ["--trainer.callbacks", "EarlyStopping", "--trainer.callbacks.monitor", "loss"],
            r"has EarlyStopping.* lower quantization\.tuning\.blocks\.epochs and .*model\.epochs instead",
        ),
        (
            ["--quantization.grid.zfold", "true", "--quantization.grid.search", "false"],
            r"zfold is true .* part of the search",
        ),
        (
            ["--output.histograms", "[q_proj, gate_prj]"],
            r"histograms has gate_prj: the projections .* are q_proj, k_proj, ",
        ),
    ],
)
def test_plan_refuses_what_fit_refuses_in_the_same_words(
    aespa: CommandLine, model: Path, words: list[object], message: str
) -> None:
    Path("section.yaml").write_text("max_steps: 3\n")
    shared = ["--model.pretrained", model, "--trainer.accelerator", "cpu"]
    shared += ["--data.calibration.segment_length", LENGTH, "--data.calibration.source", "embedded"]
    planned = aespa("plan", *shared, *words)
    assert (planned[0], planned[1], planned[2].count("\n")) == (2, "", 1)
    assert re.search(message, planned[2])
    assert aespa("fit", *shared, *words) == planned


def test_processes_of_a_host_share_its_memory(
    aespa: CommandLine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "free_bytes", lambda _: 2**20)
    status, out, err = aespa(
        "plan", "--model.pretrained", model, "--data.calibration.segment_length", LENGTH,
        "--trainer.accelerator", "cpu", "--trainer.devices", 2,
        "--quantization.method", "aespa-tuned",
    )  # fmt: skip
    assert (status, err) == (0, "")
    assert "too much" in out
    assert "of the cpu's memory, of which" in out
    assert "by each of 2 processes" in out


def test_keys_of_the_trainer_that_change_no_need_are_taken(aespa: CommandLine, model: Path) -> None:
    status, out, err = aespa(
        "plan", "--model.pretrained", model, "--data.calibration.segment_length", LENGTH,
        "--trainer.accelerator", "cpu", "--trainer.devices", 2, "--trainer.logger", "CSVLogger",
        "--trainer.logger.save_dir", "csv", "--trainer.callbacks", "LearningRateMonitor",
    )  # fmt: skip
    assert (status, err) == (0, "")
    assert "device memory" in out
    assert not list(Path().iterdir())


def test_plan_of_a_machine_that_is_not_this_one(aespa: CommandLine, model: Path) -> None:
    words = ["plan", "--model.pretrained", model, "--data.calibration.segment_length", LENGTH]
    status, out, err = aespa(*words, "--plan.device", "24 GB, 80 TFLOPS")
    assert (status, err) == (0, "")
    assert "cuda, one block at a time" in out
    assert "at 80.0 TFLOP/s of a device" in out
    assert "too" not in out
    tight = aespa(*words, "--plan.device", "0.000001GB,80 TFLOPS")
    assert tight[0] == 0
    assert "too much" in tight[1]
    for wrong in ("24", "A100", "0 GB, 80 TFLOPS"):
        status, _, err = aespa(*words, "--plan.device", wrong)
        assert (status, err.count("\n")) == (2, 1)
        assert f"plan.device is {wrong}: expected such as '24 GB, 80 TFLOPS'" in err
    status, _, err = aespa("fit", *words[1:], "--plan.device", "24 GB, 80 TFLOPS")
    assert (status, err.count("\n")) == (2, 1)
    assert "plan.device is a key of aespa-pl plan alone" in err
