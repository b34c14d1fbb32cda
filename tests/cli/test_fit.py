"""The command ``fit`` leaves the same model whatever the clock, the memory and the disk are like."""

import itertools
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from aespa_pl.commands import fit
from aespa_pl.data.texts import EMBEDDED
from tests.cli.commands import LAST, NO_TEXTS, CommandLine, Done, small


def test_fit_test_and_the_saved_configuration(aespa: CommandLine, model: Path, finished: Done) -> None:
    assert finished.out.splitlines()[-1] == "lightning_logs/aespa/version_0"
    assert re.search(r"^ +original +round-to-nearest +aespa $", finished.out, re.M)
    assert re.search(r"^ perplexity, .*\w( +\d+\.\d+){3} $", finished.out, re.M)
    run = finished.copied()
    metrics = json.loads((run / "metrics.json").read_text())
    assert set(metrics) == {"perplexity", "seconds", "peak_bytes", "size", "tokens"}
    assert set(metrics["perplexity"]) == {"original", "nearest", "quantized"}
    assert {"total", "statistics", "grid", "optq", "rounding"} <= set(metrics["seconds"])
    AutoModelForCausalLM.from_pretrained(run / "model")
    description = json.loads((run / "model" / "quantization.json").read_text())
    assert description["quantization"]["bits"] == 2
    assert set(description["losses"]) == {"0", "1"}
    assert {"aespa_pl", "torch", "transformers"} <= set(description["versions"])

    status, out, _ = aespa("test", *small(model), "--kld", "true")
    assert status == 0
    assert Path(out.splitlines()[-1]) == run
    found = json.loads((run / "test.json").read_text())["divergence"]["quantized"]["embedded"]
    assert 0 < found["mean"] < found["rare"]
    assert f"{found['mean']:.4f}" in out
    assert f"{metrics['perplexity']['quantized']['embedded']:.3f}" in out

    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["output"]["checkpoint_seconds"] is None  # whose default is a number
    assert saved["trainer"]["log_every_n_steps"] == 5
    status, out, err = aespa("fit", "--config", run / "config.yaml")
    assert (status, err) == (0, "")
    again = Path(out.splitlines()[-1])
    assert again.name == "version_1"
    for file in sorted((run / "blocks").iterdir()):
        assert file.read_bytes() == (again / "blocks" / file.name).read_bytes()


def test_a_clock_that_jumps_changes_nothing(
    aespa: CommandLine, model: Path, finished: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock goes back by a day at every look; time between checkpoints is the monotonic clock's."""
    now = itertools.count(time.time(), -86400)
    monkeypatch.setattr(time, "time", lambda: next(now))
    options = ("--output.checkpoint_seconds", 0.001, "--output.name", "jumping")
    for resume in ((), LAST):
        status, out, err = aespa("fit", *small(model), *options, *resume)
        assert (status, err) == (0, "")
    jumping = Path(out.splitlines()[-1])
    for file in sorted((finished.run / "blocks").iterdir()):
        assert file.read_bytes() == (jumping / "blocks" / file.name).read_bytes()
    seconds = json.loads((jumping / "metrics.json").read_text())["seconds"]
    assert all(value >= 0 for value in seconds.values())


def test_reading_model_and_texts_is_no_time_of_the_quantization(
    aespa: CommandLine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the first of several runs that are compared would pay for the tokens of all."""
    begin, started_at = fit._start, []

    def slow(*given: Any) -> Any:
        started, until = begin(*given), time.process_time() + 1.0
        while time.process_time() < until:
            pass
        started_at.append(time.process_time())
        return started

    monkeypatch.setattr(fit, "_start", slow)
    status, out, _ = aespa("fit", *small(model), *NO_TEXTS, "--output.name", "slow")
    worked = time.process_time() - started_at[0]
    assert status == 0
    run = Path(out.splitlines()[-1])
    seconds = json.loads((run / "metrics.json").read_text())["seconds"]
    assert seconds["total"] - seconds["quantization"] >= 1.0
    assert seconds["processor"] <= worked


def test_little_memory_gives_the_same_in_parts(aespa: CommandLine, model: Path, finished: Done) -> None:
    options = ("--data.memory_gb", 1e-6, "--output.checkpoint_seconds", 1, "--output.name", "parts")
    status, out, err = aespa("fit", *small(model), *NO_TEXTS, *options)
    assert (status, err) == (0, "")
    assert "H_V of 1 of 2 heads at once, in 2 passes over the segments" in " ".join(out.split())
    assert "learning in portions of at most" in " ".join(out.split())
    divided = Path(out.splitlines()[-1])
    for file in sorted((divided / "blocks").iterdir()):
        whole = load_file(finished.run / "blocks" / file.name)
        found = load_file(file)
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], whole[name]) for name in whole)
    assert not (divided / "portions").exists()


def test_hidden_states_on_disk(aespa: CommandLine, model: Path, finished: Done) -> None:
    status, out, _ = aespa("fit", *small(model), "--data.hidden_states", "disk")
    assert status == 0
    run = Path(out.splitlines()[-1])
    metrics = [
        json.loads((folder / "metrics.json").read_text())["perplexity"] for folder in (run, finished.run)
    ]
    assert metrics[0] == metrics[1]
    assert sorted(path.name for path in run.parent.iterdir()) == ["version_0"]


def test_without_texts_nothing_is_evaluated(unmeasured: Done) -> None:
    assert "perplexity" not in unmeasured.out
    assert (unmeasured.run / "model" / "model.safetensors.index.json").is_file()


def test_method_names_the_column_of_the_table_and_one_text_may_stand_alone(
    aespa: CommandLine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = f"{'a' * 90}.txt"
    Path(long).write_text(EMBEDDED.joinpath("heldout.txt").read_text(encoding="utf-8"))
    monkeypatch.setenv("COLUMNS", "60")
    options = ("--quantization.method", "aespa-fast", "--data.evaluation.texts", long)
    status, out, err = aespa("fit", *small(model), *options)
    assert (status, err) == (0, "")
    assert long in "".join(line[:20].strip() for line in out.splitlines())  # folded, and complete
    assert re.search(r" +original +\w* +aespa-fast $", out, re.M)
    assert re.search(r" +3\.\d+ $", out, re.M)
    assert re.search(r" +[\d.]+ KB $", out, re.M)


@pytest.mark.parametrize(("method", "lines"), [("rtn", []), ("optq", ["copy.txt is a calibration text as"])])
def test_a_text_that_is_calibrated_on_is_no_held_out_one(
    aespa: CommandLine, model: Path, method: str, lines: list[str]
) -> None:
    for name, text in (("own.txt", "calibration"), ("copy.txt", "calibration"), ("other.txt", "heldout")):
        Path(name).write_text(EMBEDDED.joinpath(f"{text}.txt").read_text(encoding="utf-8"))
    texts = "[copy.txt, other.txt, embedded]"
    options = ("--data.calibration.source", "own.txt", "--data.evaluation.texts", texts)
    status, out, err = aespa("fit", *small(model), *options, "--quantization.method", method)
    assert (status, err) == (0, "")
    assert re.findall(r"\S+ is a calibration text as", out) == lines
