"""The command line does what a user types, or says in one line why not."""

import io
import itertools
import json
import math
import re
import shutil
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from aespa_pl import cli, settings
from aespa_pl.commands import plan
from aespa_pl.data.texts import EMBEDDED
from aespa_pl.report.stored import read_run

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
MODELS = [path for path in CONFIGS if path.stem != "paper"]
LENGTH = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random model and the embedded tokenizer."""
    folder = tmp_path_factory.mktemp("with_cache") / "model"
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=2, max_position_embeddings=LENGTH, vocab_size=1024,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    for path in (EMBEDDED / "llama").iterdir():
        if path.name.startswith("tokenizer"):
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


class CommandLine:
    """Runs ``aespa-pl`` in this process, in the current folder."""

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        """Return status, stdout and stderr."""
        out, err = io.StringIO(), io.StringIO()
        status: Any = 0
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setattr(sys, "argv", ["aespa-pl", *(str(word) for word in arguments)])
            try:
                cli.main()
            except SystemExit as end:
                status = end.code or 0
        return status, out.getvalue(), err.getvalue()


@pytest.fixture
def aespa(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CommandLine:
    """The command, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return CommandLine()


@dataclass(frozen=True)
class Done:
    """Holds what a run left that several tests look at, and what it printed."""

    run: Path
    out: str

    def copied(self, name: str = "aespa") -> Path:
        """Copy the run into the current folder, as if it had been made there."""
        return Path(shutil.copytree(self.run, Path("lightning_logs", name, "version_0")))


def done(folder: Path, *arguments: object) -> Done:
    """Run ``fit`` in a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("COLUMNS", "200")
        status, out, err = CommandLine()("fit", *arguments)
    assert (status, err) == (0, "")
    return Done(folder / out.splitlines()[-1], out)


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A run with the arguments of ``small``."""
    return done(tmp_path_factory.mktemp("finished"), *small(model))


@pytest.fixture(scope="module")
def unmeasured(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A run with ``--ckpt_path last``, though there is none before, and without texts to measure."""
    return done(tmp_path_factory.mktemp("unmeasured"), *small(model), *NO_TEXTS, *LAST)


NO_TEXTS = ("--data.evaluation.texts", "[]")
LAST = ("--ckpt_path", "last")


def small(model: Path) -> list[object]:
    """Return the arguments of a run that takes a second; the runs of this module share a cache."""
    return [
        "--model.pretrained", model, "--data.calibration.source", "embedded",
        "--data.calibration.segments", 4, "--data.calibration.segment_length", LENGTH,
        "--data.evaluation.texts", "[embedded]", "--data.evaluation.max_segments", 3,
        "--data.cache", model.parent / "cache", "--quantization.method", "aespa",
        "--quantization.rounding.iterations", 10,
        "--output.checkpoint_seconds", "null",
        "--trainer.accelerator", "cpu", "--trainer.log_every_n_steps", 5,
    ]  # fmt: skip


def all_keys(kind: Any, prefix: str) -> list[str]:
    """Return the keys of a section."""
    found = []
    for field in fields(kind):
        inner = field.default_factory if is_dataclass(field.default_factory) else None
        key = f"{prefix}.{field.name}"
        found += all_keys(inner, key) if inner else [key]
    return found


KEYS = (
    all_keys(settings.ModelSettings, "model")
    + all_keys(settings.DataSettings, "data")
    + all_keys(settings.QuantizationSettings, "quantization")
    + all_keys(settings.OutputSettings, "output")
    + ["ckpt_path", "trainer.precision"]
)


def test_help_explains_every_key(aespa: CommandLine) -> None:
    status, out, _ = aespa("fit", "--help")
    assert status == 0
    assert len(KEYS) > 35
    explained = re.findall(r"^  --([\w.]+)[^\n]*?(?:\n {8,}|  +)(?!\(type)([A-Za-z].*)$", out, re.M)
    assert not set(KEYS) - {key for key, _ in explained}


@pytest.mark.parametrize("path", MODELS, ids=[path.stem for path in MODELS])
def test_shipped_configurations_are_valid_and_the_paper_changes_the_algorithm_alone(
    aespa: CommandLine, path: Path
) -> None:
    """The four things that are ours are off, lambda is the paper's; the rest is the model's own."""
    status, out, err = aespa("fit", "--config", path, "--print_config")
    assert (status, err) == (0, "")
    printed = yaml.safe_load(out)
    assert printed["model"]["pretrained"] == yaml.safe_load(path.read_text())["model"]["pretrained"]
    quantization = printed["quantization"]
    assert quantization["bits"] in (2, 3)
    assert quantization["method"] == "aespa-tuned"
    quantization["method"] = "aespa"
    quantization["polish"]["enabled"] = False
    quantization["input_correction"] = 0.0
    quantization["rounding"] |= {"keep_best": False, "penalty_other": 1.5}
    printed["output"]["name"] = "paper"
    both = ("--config", path.name, "--config", "paper.yaml")
    assert yaml.safe_load(aespa("fit", *both, "--print_config")[1]) == printed


def test_printed_configuration_is_one(aespa: CommandLine) -> None:
    out = aespa("fit", "--config", CONFIGS[0], "--print_config")[1]
    Path("again.yaml").write_text(out)
    again = aespa("fit", "--config", "again.yaml", "--print_config")[1]
    assert yaml.safe_load(again) == yaml.safe_load(out)


def test_fit_test_and_the_saved_configuration(
    aespa: CommandLine, model: Path, finished: Done
) -> None:
    assert finished.out.splitlines()[-1] == "lightning_logs/aespa/version_0"
    for row in ("original", "round-to-nearest", "aespa"):
        assert re.search(rf"{row} +│ +\d+\.\d+", finished.out)
    run = finished.copied()
    metrics = json.loads((run / "metrics.json").read_text())
    assert set(metrics) == {"perplexity", "seconds", "peak_bytes"}
    assert set(metrics["perplexity"]) == {"original", "nearest", "quantized"}
    assert {"total", "statistics", "grid", "optq", "rounding"} <= set(metrics["seconds"])
    AutoModelForCausalLM.from_pretrained(run / "model")
    description = json.loads((run / "model" / "quantization.json").read_text())
    assert description["quantization"]["bits"] == 2
    assert set(description["losses"]) == {"0", "1"}
    assert {"aespa_pl", "torch", "transformers"} <= set(description["versions"])

    status, out, _ = aespa("test", *small(model))
    assert status == 0
    assert Path(out.splitlines()[-1]) == run
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


def test_curves_of_every_projection_of_every_block(finished: Done) -> None:
    for block in ("block_000", "block_001"):
        events = EventAccumulator(str(finished.run / block))
        events.Reload()
        tags = events.Tags()["scalars"]
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
            points = events.Scalars(f"loss_reconstruction/{name}")
            assert [point.step for point in points] == [5, 10]
            assert all(math.isfinite(point.value) for point in points)
            assert f"share_undecided/{name}" in tags


def test_plan_needs_the_configuration_alone(
    aespa: CommandLine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "MEASURING_SECONDS", 0.1)
    Path("bare").mkdir()
    Path("bare/config.json").write_bytes((model / "config.json").read_bytes())
    status, out, err = aespa(
        "plan", "--config", ROOT / "configs/llama30b_w2.yaml", "--model.pretrained", "bare",
        "--data.calibration.segment_length", LENGTH, "--trainer.accelerator", "cpu",
    )  # fmt: skip
    assert (status, err) == (0, "")
    for word in ("device memory", "host memory", "disk", "arithmetic", "time", "2 blocks"):
        assert word in out
    assert not Path("lightning_logs").exists()
    status, _, err = aespa("plan", "--model.pretrained", "nowhere/")
    assert (status, err.count("\n")) == (2, 1)


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


def test_little_memory_gives_the_same_in_parts(
    aespa: CommandLine, model: Path, finished: Done
) -> None:
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
        json.loads((folder / "metrics.json").read_text())["perplexity"]
        for folder in (run, finished.run)
    ]
    assert metrics[0] == metrics[1]
    assert sorted(path.name for path in run.parent.iterdir()) == ["version_0"]


def test_curves_over_the_blocks(aespa: CommandLine, model: Path) -> None:
    polish = ("--quantization.polish.enabled", "true", "--quantization.method", "aespa-fast")
    assert aespa("fit", *small(model), *NO_TEXTS, *polish)[0] == 0
    run = Path("lightning_logs/aespa/version_0")
    journal = json.loads((run / "journal.json").read_text())
    events = EventAccumulator(str(run / "walk"))
    events.Reload()
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
        for block, points in enumerate(
            zip(
                events.Scalars(f"loss_of_nearest/{name}"),
                events.Scalars(f"polish_loss_of_before/{name}"),
                events.Scalars(f"polish_changed/{name}"),
                events.Scalars(f"polish_passes/{name}"),
                strict=True,
            )
        ):
            assert [point.step for point in points] == [block] * 4
            losses = journal["blocks"][str(block)]["losses"][name]
            expected = [
                losses["final"] / losses["nearest"],
                losses["final"] / losses["before_polish"],
                losses["polish_changed"],
                losses["polish_passes"],
            ]
            assert [point.value for point in points] == pytest.approx(expected)
    assert len(events.Scalars("seconds/statistics")) == 2
    assert not (run / "block_000").exists()  # nothing is learned


def test_without_texts_nothing_is_evaluated(unmeasured: Done) -> None:
    assert "perplexity" not in unmeasured.out
    assert (unmeasured.run / "model" / "model.safetensors.index.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quantization.bits", 1], r"quantization\.bits is [19]: 2 to 8$"),
        (["--quantization.bits", 9], r"quantization\.bits is [19]: 2 to 8$"),
        (
            ["--quantization.bit", 3],
            r"quantization\.bit is unknown: did you mean quantization\.bits\?",
        ),
        (
            ["--quantization.rounding.iterations", 0],
            r"rounding\.iterations is 0: a whole number, 1 or more$",
        ),
        (
            ["--quantization.group_size", 7],
            r"group_size is 7, but the projections have columns 16 \(.*, 24 \(",
        ),
        (["--data.calibration.segment_length", 64], r"segment_length is 64, but .* has 32 posi"),
        (["--data.evaluation.segment_length", 64], r"segment_length is 64, but .* has 32 posi"),
        (["--data.calibration.segments", 100000], r"too short: 100000 segments"),
        (["--data.calibration.source", "no.txt"], r"calibration\.source: no\.txt is neither"),
        (["--data.evaluation.texts", "[no.txt]"], r"evaluation\.texts: no\.txt is neither"),
        (["--model.pretrained", "./no"], r"model\.pretrained: there is no folder no:"),
        (["--config", "no.yaml"], r"no file no\.yaml here.* one of .*opt125m_w2\.yaml"),
        (["--trainer.log_every_n_steps", 0], r"trainer\.log_every_n_steps: 1 or more"),
        (["--trainer.max_steps", 5], r"trainer\.max_steps.*rounding\.iterations instead"),
        (["--trainer.limit_train_batches", 0], r"limit_train_batches.*rounding\.iterations"),
        (["--trainer.precision", "bf16-true"], r"trainer\.precision is bf16-true.*model\.dtype"),
        (["--trainer.accelerator", "abacus"], r"trainer: .*accelerator"),
        (["--data.evaluation.segment_length", 1], r"segment_length is 1: at least 2"),
        (
            ["--trainer.devices", 2, "--trainer.strategy", "ddp_spawn"],
            r"trainer\.strategy is ddp_spawn.*set it to ddp",
        ),
        (["--output.folder", "file"], r"cannot write to file/aespa.*--output\.folder"),
        (["--ckpt_path", "no"], r"no is not the folder of a run"),
        (
            ["--output.folder", "s3://runs"],
            r"output\.folder is s3://runs: a folder of this machine",
        ),
        (["--output.name", "../.."], r"output\.name is '\.\./\.\.': a name inside"),
        (
            ["--output.histograms", "[q_proj, gate_prj]"],
            r"histograms has gate_prj: did you mean gate_proj\? the projections .* are q_proj, k_proj, ",
        ),
        (["--quantization.rounding.learning_rate", "inf"], r"rate is inf: a finite number above 0"),
        (["--quantization.rounding.penalty_other", "nan"], r"other is nan: a finite number, 0 or"),
        (
            ["--quantization.rounding.beta_start", "inf"],
            r"start is inf: a finite number, 2 or more",
        ),
        (
            ["--quantization.method", "aesop"],
            r"method is aesop: rtn, optq, zfold, .*, aespa-tuned$",
        ),
        (["--quantization.symmetric", "maybe"], r"symmetric is maybe: true or false$"),
        (["--seed_everything", 2**32], r"seed_everything is 4294967296: true or false, or 0 to"),
        (["--bits", 3], r"bits is unknown: did you mean quantization\.bits\?"),
        (["--quantization.bits"], r"quantization\.bits has no value"),
        (["opt.yaml"], r"opt\.yaml stands alone.*--config opt\.yaml"),
        (["--trainer.devises", 2], r"trainer\.devises is unknown: did you mean trainer\.devices\?"),
        (
            ["--trainer.logger", "NoLogger"],
            r"trainer\.logger: there is no NoLogger: give the name of",
        ),
        (
            ["--trainer.callbacks", "EarlyStoping"],
            r"trainer\.callbacks: there is no EarlyStoping: did you mean EarlyStopping\? give the name of",
        ),
        (
            ["--trainer.callbacks", "EarlyStopping"],
            r"trainer\.callbacks .* \(EarlyStopping: the following arguments are required: monitor\)",
        ),
        (
            ["--trainer.callbacks", "[LearningRateMonitor, mine.Callback]"],
            r"trainer\.callbacks: there is no mine\.Callback: give .*such as my_package\.MyClass",
        ),
        (["--trainer.accelerator", "gpu"], r"trainer\.accelerator is gpu: set it to cpu"),
        (["--trainer.logger", "WandbLogger"], r"trainer: .*wandb"),
        (
            ["--trainer.callbacks+", "RichProgressBar"],
            r"trainer\.callbacks has RichProgressBar: remove it",
        ),
        (
            ["--trainer.callbacks+", "Timer"],
            r"\(the type Interval\): give it as a text, such as step",
        ),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    aespa: CommandLine, model: Path, arguments: list[object], message: str
) -> None:
    Path("file").write_text("not a folder")
    status, out, err = aespa("fit", *small(model), *arguments)
    assert status == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("aespa-pl: ")
    assert re.search(message, err)
    assert not list(Path().glob("lightning_logs/aespa/*"))


def test_required_key_and_yaml_mistakes(aespa: CommandLine, model: Path) -> None:
    assert aespa("fit")[0] == 2
    Path("wrong.yaml").write_text(f"model:\n  pretrained: {model}\nquantization:\n  bit: 3\n")
    status, _, err = aespa("fit", "--config", "wrong.yaml")
    assert (status, err.count("\n")) == (2, 1)
    assert "quantization.bit" in err
    Path("broken.yaml").write_text("model: [\n")
    status, _, err = aespa("fit", "--config", "broken.yaml")
    assert (status, err.count("\n")) == (2, 1)


def damage_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def damage_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def damage_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def damage_family(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def put_nan(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 2] = math.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_config, r"no config\.json"),
        (damage_weights, r"model\.pretrained: .*safetensors"),
        (damage_tokenizer, r"tokenizer"),
        (damage_family, r"gpt2.*opt, bloom, llama"),
        (truncate, r"model\.safetensors"),
        (put_nan, r"layers\.1\.mlp\.down_proj\.weight .*NaN or infinite"),
    ],
)
def test_damaged_model_is_refused_before_calibration(
    aespa: CommandLine, model: Path, damage: Any, message: str
) -> None:
    shutil.copytree(model, "model")
    damage(Path("model"))
    status, out, err = aespa("fit", *small(Path("model")))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert re.search(message, err)


def test_full_disk_is_said_before_anything_is_computed(
    aespa: CommandLine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(".")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    status, out, err = aespa("fit", *small(model))
    assert (status, out) == (2, "")
    assert re.search(
        r"1\.0 KB free, but the run needs about [\d.]+ KB more.* --output\.folder", err
    )


def test_unfinished_run_is_not_measured(aespa: CommandLine, model: Path, unmeasured: Done) -> None:
    (unmeasured.copied() / "metrics.json").unlink()
    status, _, err = aespa("test", *small(model))
    assert status == 2
    assert "not finished: continue it" in err


def test_run_of_another_model_is_not_measured(
    aespa: CommandLine, model: Path, unmeasured: Done
) -> None:
    unmeasured.copied()
    status, _, err = aespa("test", *small(model), "--model.pretrained", "embedded:llama")
    assert (status, err.count("\n")) == (2, 1)
    assert "made from another model than embedded:llama" in err


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


def test_write_that_fails_in_a_checkpoint_is_one_line(
    aespa: CommandLine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*small(model), *NO_TEXTS, "--output.checkpoint_iterations", 4]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fail_to_write)
        status, _, err = aespa("fit", *arguments)
    assert (status, err.count("\n")) == (2, 1)
    assert re.search(r"cannot write to .*checkpoints.*continue with: aespa-pl fit --ckpt_path", err)
    assert aespa("fit", *arguments, *LAST)[0] == 0


def test_disk_that_fills_under_tensorboard_is_one_line(
    aespa: CommandLine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorBoard writes in a thread of its own, whose traceback nobody needs."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tensorboard.summary.writer.record_writer.RecordWriter.write", full)
    status, _, err = aespa("fit", *small(model), *NO_TEXTS)
    assert (status, err.count("\n")) == (2, 1)
    assert re.search(r"No space left on device; continue with: aespa-pl fit --ckpt_path", err)


def fail_to_write(*_: object) -> None:
    raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 5440 vs 5334")


def test_run_alone_is_continued_and_measured(
    aespa: CommandLine, finished: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's folder, or any file in it, is enough from another folder, without another key."""
    run = finished.copied("mine").absolute()
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    for path in (run, run / "journal.json"):
        status, out, err = aespa("fit", "--ckpt_path", path)
        assert (status, err) == (0, "")
        assert "finished already" in " ".join(out.split())
    status, out, err = aespa("test", "--ckpt_path", run / "config.yaml")
    assert (status, err) == (0, "")
    assert out.splitlines()[-1] == str(run)
    assert not list(Path().glob("lightning_logs"))


def test_changed_weights_are_not_measured(
    aespa: CommandLine, model: Path, unmeasured: Done
) -> None:
    shard = sorted((unmeasured.copied() / "model").glob("*.safetensors"))[-1]
    tensors = load_file(shard)
    save_file({name: -tensor for name, tensor in tensors.items()}, shard, {"format": "pt"})
    status, out, err = aespa("test", *small(model))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert re.search(rf"damaged .*{shard.name} is missing or changed.*fit --ckpt_path", err)


def test_upgraded_package_does_not_continue_a_run(
    aespa: CommandLine, model: Path, finished: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished.copied()
    monkeypatch.setattr("aespa_pl.__version__", "9.0")
    status, _, err = aespa("fit", *small(model), *LAST)
    assert (status, err.count("\n")) == (2, 1)
    assert re.search(r"version of aespa-pl was \S+ and is 9\.0", err)


def test_model_dtype_may_change_in_a_continued_run(aespa: CommandLine, model: Path) -> None:
    arguments = [*small(model), *NO_TEXTS, "--quantization.method", "aespa-fast"]
    assert aespa("fit", *arguments, "--model.dtype", "bfloat16")[0] == 0
    Path("lightning_logs/aespa/version_0/metrics.json").unlink()
    arguments += ["--model.dtype", "float32", *LAST]
    assert aespa("fit", *arguments)[0] == 0


def test_method_names_the_row_of_the_table_and_one_text_may_stand_alone(
    aespa: CommandLine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = f"{'a' * 90}.txt"
    Path(long).write_text(EMBEDDED.joinpath("heldout.txt").read_text(encoding="utf-8"))
    monkeypatch.setenv("COLUMNS", "60")
    options = ("--quantization.method", "aespa-fast", "--data.evaluation.texts", long)
    status, out, err = aespa("fit", *small(model), *options)
    assert (status, err) == (0, "")
    assert long in out
    assert re.search(r"│ aespa-fast +│ +\d+\.\d+ │$", out, re.M)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\x00", r"wrong\.yaml is no YAML"),
        (b"model: [", r"wrong\.yaml is no YAML"),
        (b"[" * 5000, r"wrong\.yaml is nested too deeply"),
        (b"- model", r"wrong\.yaml has no keys"),
        (b"quantization: 3\n", r"quantization is unknown \(wrong\.yaml\)|quantization is 3"),
        (
            b"quantization: {bits: 1, grup_size: 4}\ndata: {batch_size: 0}\n",
            r"bits is 1: 2 to 8 \(wrong\.yaml\); .*grup_size is unknown \(wrong\.yaml\): did you mean "
            r"quantization\.group_size\?; data\.batch_size is 0: .*; model\.pretrained is missing",
        ),
    ],
)
def test_mistakes_in_a_file_are_told_together(
    aespa: CommandLine, content: bytes, message: str
) -> None:
    Path("wrong.yaml").write_bytes(content)
    status, out, err = aespa("fit", "--config", "wrong.yaml")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert re.search(message, err)


LIGHT = """
import sys
from aespa_pl.cli import main
try:
    main(sys.argv[1:])
finally:
    large = ("torch", "lightning", "transformers", "datasets", "tensorboard")
    print([name for name in large if name in sys.modules], file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--help"], r"fit +Quantize(.*\n)+  test (.*\n)+  plan (.*\n)+  export (.*\n)+  report "),
        (["--version"], r"^aespa-pl \d"),
        (["plan", "--help"], r"--model\.pretrained"),
        (["fti"], r"fti is no command: did you mean fit\?"),
        (["quantize"], r"quantize is no command: expected one of fit, test, compare, plan"),
        (["fit", "--quantization.bit", "3"], r"did you mean quantization\.bits"),
        (["plan"], r"model\.pretrained is missing"),
    ],
)
def test_nothing_large_is_imported_for_an_answer(words: list[str], expected: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, *words], capture_output=True, text=True, check=False
    )
    assert re.search(expected, done.stdout + done.stderr)
    assert done.stderr.splitlines()[-1] == "[]"
    assert len(done.stdout.splitlines()) < 65  # a screen


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "last"], "format is missing: aespa-pl export --help shows what to give"),
        (
            ["export", "last", "--format", "ggml"],
            "--format is ggml: hf, compressed-tensors, awq, gptq, gguf",
        ),
    ],
)
def test_missing_or_unknown_word_is_named(
    words: list[str], message: str, aespa: CommandLine
) -> None:
    assert aespa(*words) == (2, "", f"aespa-pl: {message}\n")


def test_command_that_is_not_there_breaks_no_other(
    aespa: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = cli.Command("aespa_pl.commands.of_tomorrow:run", "Does more.")
    monkeypatch.setitem(cli.COMMANDS, "tomorrow", command)
    assert "tomorrow  Does more." in aespa("--help")[1]
    status, _, err = aespa("tomorrow")
    assert (status, err) == (2, "aespa-pl: tomorrow does not come with this version of aespa-pl\n")


def test_keys_that_the_walk_decides_are_not_offered(aespa: CommandLine) -> None:
    out = aespa("fit", "--help")[1]
    assert "--trainer.log_every_n_steps" in out
    for key in ("max_steps", "max_epochs", "overfit_batches", "fast_dev_run"):
        assert f"--trainer.{key}" not in out


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        MemoryError(),
    ],
)
def test_lack_of_memory_names_what_needs_less(
    aespa: CommandLine, model: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("aespa_pl.walk.walk.Walk.quantize", fail)
    status, _, err = aespa("fit", *small(model), *NO_TEXTS)
    assert (status, err.count("\n")) == (2, 1)
    for word in ("data.memory_gb", "data.hidden_states", "data.batch_size", "fit --ckpt_path"):
        assert word in err


def test_other_errors_keep_their_traceback(
    aespa: CommandLine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("aespa_pl.walk.walk.Walk.quantize", fail)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        aespa("fit", *small(model), *NO_TEXTS)


def test_refused_input_leaves_no_folder(
    aespa: CommandLine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(".")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert aespa("fit", *small(model), "--output.folder", "new/runs")[0] == 2
    assert not Path("new").exists()


def test_space_that_a_run_has_filled_itself_is_not_asked_for_again(
    aespa: CommandLine, model: Path, unmeasured: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*small(model), *NO_TEXTS]
    run = unmeasured.copied()
    (run / "metrics.json").unlink()
    # each file of the run is worth a MB to the second look: more than such a model needs
    (run / "ballast").write_bytes(bytes(2**20))
    usage = shutil.disk_usage(".")._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert aespa("fit", *arguments)[0] == 2
    assert aespa("fit", *arguments, *LAST)[0] == 0


def test_accelerator_that_is_no_cpu_and_no_cuda_is_refused(
    aespa: CommandLine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is that of a Mac, where Lightning's auto is MPS."""
    monkeypatch.setattr(
        "lightning.pytorch.strategies.SingleDeviceStrategy.root_device", torch.device("mps")
    )
    status, out, err = aespa("fit", *small(model), "--trainer.accelerator", "auto")
    assert (status, out) == (2, "")
    assert re.search(r"trainer\.accelerator is auto, which is mps here: .*set it to cpu", err)


def test_plan_refuses_what_fit_refuses_and_says_what_is_too_little(
    aespa: CommandLine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "MEASURING_SECONDS", 0.1)
    words = ["plan", "--model.pretrained", model, "--trainer.accelerator", "cpu"]
    status, _, err = aespa(*words)
    assert status == 2
    assert "segment_length is 2048, but" in err
    words += ["--data.calibration.segment_length", LENGTH]
    status, _, err = aespa(*words, "--quantization.group_size", 7)
    assert status == 2
    assert "group_size is 7, but" in err
    assert "too little" not in aespa(*words)[1]
    usage = shutil.disk_usage(".")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    out = " ".join(aespa(*words)[1].split())
    assert re.search(r"too little here: disk: 1\.0 KB are free here, [\d.]+ KB are needed", out)


def test_finished_run_is_not_done_again(aespa: CommandLine, model: Path, finished: Done) -> None:
    run = finished.copied()
    status, out, _ = aespa("fit", *small(model), *LAST)
    assert status == 0
    assert "finished already" in out
    assert out.splitlines()[-1] == str(run)


def test_last_without_a_run_begins_the_first(unmeasured: Done) -> None:
    assert "this is the first" in unmeasured.out


def test_report_takes_several_runs_or_the_last(
    aespa: CommandLine, finished: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures are left empty, as it takes seconds to draw them."""
    pytest.importorskip("matplotlib", reason="the report's figures need matplotlib")
    monkeypatch.setattr("aespa_pl.report.picture.Picture.svg", '<svg viewBox="0 0 1 1"></svg>')
    runs = [finished.copied(name) for name in ("first", "second")]
    (runs[1] / "journal.json").touch()  # the newer one
    status, out, err = aespa("report", *runs, "--output", "page", "--figures", "none")
    assert (status, out, err) == (0, "page/report.html\n", "")
    page = Path("page/report.html").read_text()
    assert "first/version_0" in page
    assert "second/version_0" in page
    status, out, _ = aespa("report", "last", "--figures", "none")
    assert (status, out) == (0, "lightning_logs/second/version_0/report/report.html\n")


def test_journal_has_what_the_report_shows_of_a_block(model: Path, finished: Done) -> None:
    blocks = json.loads((finished.run / "journal.json").read_text())["blocks"]
    for record in blocks.values():
        assert record["peak_bytes"]["host"] > 10**7
        assert all(0 < losses["share_not_nearest"] < 1 for losses in record["losses"].values())
    tokens = calibration_tokens_of(model)
    original, quantized = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(
            tokens, output_hidden_states=True
        ).hidden_states
        for folder in (model, finished.run / "model")
    )
    before, after = (states[1].detach() for states in (original, quantized))
    # after block 0: the last block has the final norm behind it
    expected = float((after - before).square().sum() / before.square().sum())
    assert blocks["0"]["output_error"]["rounded"] == pytest.approx(expected, rel=1e-4)
    assert "output_error" not in blocks["1"]  # nothing is run through the last block


def calibration_tokens_of(model: Path) -> torch.Tensor:
    """Return the calibration segments of ``small``, which the run has put into its cache."""
    (cached,) = [
        tensors["tokens"]
        for path in (model.parent / "cache").rglob("*.safetensors")
        if (tensors := load_file(path)).get("tokens", torch.empty(0)).shape == (4, LENGTH)
    ]
    return cached


def test_tensorboard_shows_configuration_and_result(finished: Done) -> None:
    events = EventAccumulator(str(finished.run / "walk"))
    events.Reload()
    assert "configuration/text_summary" in events.Tags()["tensors"]
    perplexity = json.loads((finished.run / "metrics.json").read_text())["perplexity"]
    for kind, texts in perplexity.items():
        (point,) = events.Scalars(f"perplexity/{kind}/embedded")
        assert point.value == pytest.approx(texts["embedded"], rel=1e-6)


def test_help_of_plan_is_one_screen(aespa: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert 24 <= aespa("plan", "--help")[1].count("\n") <= 40


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("fit", ["--tasks", "[piqa]"], r"tasks is a key of aespa-pl test alone"),
        ("test", ["--tasks", "[piqa]", "--task_limit", 0], r"task_limit is 0: a whole number"),
        ("test", ["--task_limits", 1], r"task_limits is unknown: did you mean task_limit\?"),
    ],
)
def test_tasks_are_keys_of_test(
    aespa: CommandLine, model: Path, command: str, arguments: list[object], message: str
) -> None:
    status, _, err = aespa(command, *small(model), *arguments)
    assert (status, err.count("\n")) == (2, 1)
    assert re.search(message, err)


def test_packed_model_without_texts_or_tasks_is_refused(aespa: CommandLine, model: Path) -> None:
    shutil.copytree(model, "packed")
    config = json.loads((model / "config.json").read_text())
    packed = {"quant_method": "compressed-tensors", "dequantize": True}
    Path("packed/config.json").write_text(json.dumps(config | {"quantization_config": packed}))
    status, _, err = aespa(
        "test", "--model.pretrained", "packed", "--trainer.accelerator", "cpu", *NO_TEXTS
    )
    assert (status, err.count("\n")) == (2, 1)
    assert "data.evaluation.texts is empty: name at least one text, or tasks with --tasks" in err


def test_histograms_of_chosen_projections(aespa: CommandLine, model: Path) -> None:
    assert aespa("fit", *small(model), *NO_TEXTS, "--output.histograms", "[q_proj]")[0] == 0
    folder = Path("lightning_logs/aespa/version_0/block_001")
    events = EventAccumulator(str(folder), {"histograms": 0})  # all of them, not the last
    events.Reload()
    assert events.Tags()["histograms"] == ["rounding_variables/q_proj"]
    entries = events.Histograms("rounding_variables/q_proj")
    assert [entry.step for entry in entries] == [1, 5, 10]
    for entry in entries:
        values = entry.histogram_value
        assert values.num == 16 * 16
        assert 0 <= values.min <= values.max <= 1
    shown = read_run(folder.parent).curves.histograms["rounding_variables"]
    assert shown[1, "q_proj"].steps.tolist() == [1, 5, 10]
