"""A mistake in the arguments is one line that says what to do, and status 2."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from lightning.pytorch.accelerators import MPSAccelerator

from aespa_pl.commands.arguments import Arguments
from aespa_pl.commands.sections import AespaCLI
from tests.cli.commands import NO_TEXTS, CommandLine, small

DECIDED = (
    r"is decided by the walk: set quantization\.tuning\.blocks\.epochs and "
    r"quantization\.tuning\.model\.epochs, or quantization\.rounding\.iterations where the method learns"
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quantization.bits", 1], r"quantization\.bits is [19]: expected a whole number from 2 to 8$"),
        (["--quantization.bits", 9], r"quantization\.bits is [19]: expected a whole number from 2 to 8$"),
        (
            ["--quantization.bits_of", "{down_proj: 9}"],
            r"bits_of is {down_proj: 9}: expected a number .* 2 to 8, or 16 .* such as {down_proj: 4}$",
        ),
        (["--quantization.bits_of", "{v: 3}"], r"bits_of: v names nothing in this model: expected a p"),
        (["--quantization.bits_of", "{7: 3}"], r"bits_of: 7 names .*a block \(0 to 1\), or both, such as"),
        (["--output.folder", "s3://runs"], r"output\.folder is s3://runs: expected a folder of this machine"),
        (
            ["--quantization.group_size", 5],
            r"group_size is 5, but .*: choose a divisor of all, such as 2, 4, 8, or null$",
        ),
        (["--quantization.bits_of", "{'*': 16}"], r"bits_of keeps all projections: give fewer of them 16"),
        (["--quantization.bits_of", "{lm_head: 8}"], r"lm_head: 8, and no block type for rows of 16 weights"),
        (["--quantization.bits_of", "{0.v: 3}"], r"bits_of: 0\.v names nothing"),
        (["--quantization.types", "{0: Q6_K}"], r"types has 0 and quantization\.format is uniform: choose"),
        (["--quantization.bits_of", "{'*.v': 3}"], r"bits_of: \*\.v names nothing .*\*\.q_proj"),
        (["--quantization.types", "{embeding: Q6_K}"], r"has embeding and .*: did you mean embedding\?$"),
        (["--quantization.types", "{embedding: Q6_K}"], r"{embedding: Q8_0}' or leave embedding out$"),
        (["--quantization.bit", 3], r"quantization\.bit is unknown: did you mean quantization\.bits\?"),
        (
            ["--quantization.rounding.iterations", 0],
            r"rounding\.iterations is 0: expected a whole number, 1 or more$",
        ),
        (
            ["--trainer.devices", 5, "--quantization.method", "aespa-tuned"],
            r"make 5 devices, but 4 segments in batches of 4 are enough for 1: lower",
        ),
        (
            ["--quantization.tuning", "3"],
            r"quantization\.tuning is a section.* such as quantization\.tuning\.",
        ),
        (
            ["--quantization.tuning", "{blocks: {epoch: 1}}"],
            r"tuning\.blocks\.epoch is unknown: did you mean",
        ),
        (["--output.name", "../elsewhere"], r"output\.name is \.\./elsewhere: expected a name"),
        (["--output.name", "/elsewhere"], r"output\.name is /elsewhere: expected a name"),
        (["--output.name", "./"], r"output\.name is \./: expected a name"),
        (["--output.name", ""], r"output\.name is : expected a name"),
        (["--model", "embedded:opt"], r"model is a section.* such as model\.pretrained$"),
        (
            ["--quantization.group_size", 7],
            r"group_size is 7, but the projections have columns 16 \(.*, 24 \(",
        ),
        (["--data.calibration.segment_length", 64], r"segment_length is 64, but .* has 32 posi"),
        (["--data.evaluation.segment_length", 64], r"segment_length is 64, but .* has 32 posi"),
        (["--data.calibration.segments", 100000], r"of 100000 to be drawn"),
        (["--data.calibration.source", "no.txt"], r"calibration\.source: no\.txt is neither"),
        (
            ["--data.calibration.source", "{embedded: 1, no.txt: 0.5}"],
            r"calibration\.source: no\.txt is neither",
        ),
        (["--data.evaluation.texts", "[no.txt]"], r"evaluation\.texts: no\.txt is neither"),
        (["--model.pretrained", "./no"], r"model\.pretrained: there is no folder no:"),
        (["--config", "no.yaml"], r"no file no\.yaml here.* one of .*opt125m_w2\.yaml"),
        (["--trainer.log_every_n_steps", 0], r"trainer\.log_every_n_steps is 0: expected 1 or more"),
        (["--trainer.max_steps", 5], f"trainer\\.max_steps {DECIDED}"),
        (["--trainer.limit_train_batches", 0], f"limit_train_batches {DECIDED}"),
        (["--trainer", "trainer.yaml"], f"trainer\\.max_epochs {DECIDED}"),
        (["--trainer", '{"max_time": "1"}'], f"trainer\\.max_time {DECIDED}"),
        (
            ["--config", "folder/refers.yaml"],
            r"Group 'trainer' does not accept option 'devises': .*--help trainer",
        ),
        (["--config", "folder/empty.yaml"], r"trainer is a section.* trainer\.accelerator \(.*empty\.yaml\)"),
        (["--trainer", "none.yaml"], r"trainer can't have this value \(.*none\.yaml"),
        (["--trainer.gradient_clip_val", 0.5], r"trainer\.gradient_clip_val is 0\.5: remove it"),
        (["--data.evaluation.segment_length", 1], r"segment_length is 1: expected 2 or more"),
        (
            ["--trainer.devices", 2, "--trainer.strategy", "ddp_spawn"],
            r"trainer\.strategy is ddp_spawn.*set it to ddp",
        ),
        (["--output.folder", "file"], r"output\.folder: file is a file: name a folder$"),
        (["--ckpt_path", "no"], r"no is not the folder of a run"),
        (["--quantization.rounding.learning_rate", "inf"], r"rate is inf: expected a finite number above 0"),
        (["--quantization.rounding.penalty_other", "nan"], r"other is nan: expected a finite number, 0 or"),
        (["--quantization.rounding.beta_start", "inf"], r"start is inf: expected a finite number, 2 or more"),
        (
            ["--quantization.method", "aesop"],
            r"method is aesop: expected one of rtn, optq, zfold, .*, aespa-tuned$",
        ),
        (["--quantization.symmetric", "maybe"], r"symmetric is maybe: expected true or false$"),
        (["--seed_everything", 2**32], r"seed_everything is 4294967296: expected true or false, or 0 to"),
        (["--bits", 3], r"bits is unknown: did you mean quantization\.bits\?"),
        (["--quantization.bits"], r"quantization\.bits has no value"),
        (["opt.yaml"], r"opt\.yaml stands alone.*--config opt\.yaml"),
        (["--trainer.qqqq", 2], r"trainer\.qqqq is unknown: aespa-pl fit --help trainer shows what there"),
        (
            ["--trainer.logger", "NoLogger"],
            r"trainer\.logger can't have this value \(NoLogger\): give the name of",
        ),
        (
            ["--trainer.callbacks", "EarlyStopping"],
            r"trainer\.callbacks .* \(EarlyStopping: the following arguments are required: monitor\)",
        ),
        (
            ["--trainer.callbacks", "[LearningRateMonitor, mine.Callback]"],
            r"trainer\.callbacks .* No module named 'mine'\): give .*such as my_module\.MyClass, with the "
            r"folder of .*PYTHONPATH",
        ),
        (["--trainer.accelerator", "gpu"], r"trainer: No supported gpu"),
        (["--trainer.logger", "WandbLogger"], r"trainer: .*wandb"),
        (["--trainer.logger", "CSVLogger"], r"required: save_dir\): give --trainer.logger.save_dir as well"),
        (["--trainer.callbacks+", "RichProgressBar"], r"trainer\.callbacks has RichProgressBar: remove it"),
        (
            [
                "--trainer.callbacks+",
                "GradientAccumulationScheduler",
                "--trainer.callbacks.scheduling",
                "{0: 2}",
            ],
            r"trainer\.callbacks has GradientAccumulationScheduler: remove it",
        ),
        (
            ["--trainer.callbacks+", "LearningRateFinder"],
            r"trainer\.callbacks has LearningRateFinder: remove it",
        ),
        (
            ["--trainer.callbacks+", "LearningRateMonitor", "--trainer.logger", "false"],
            r"trainer\.callbacks has LearningRateMonitor, which needs a logger: leave trainer\.logger out",
        ),
        (
            ["--trainer.callbacks+", "ModelCheckpoint", "--trainer.callbacks.monitor", "val_loss"],
            r"ModelCheckpoint, whose monitor is val_loss, which no training here logs: the names begin with",
        ),
        (["--trainer.callbacks+", "Timer"], r"can't be saved .*Interval\.step.*: give it as a text"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    aespa: CommandLine, model: Path, arguments: list[object], message: str
) -> None:
    Path("file").write_text("not a folder")
    Path("trainer.yaml").write_text("max_epochs: 3\n")
    Path("folder").mkdir()
    Path("folder/refers.yaml").write_text("trainer: beside.yaml\n")
    Path("folder/empty.yaml").write_text("trainer:\n")
    Path("folder/beside.yaml").write_text("devises: 2\n")
    status, out, err = aespa("fit", *small(model), *arguments)
    assert status == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("aespa-pl: ")
    assert re.search(message, err)
    assert not list(Path().glob("lightning_logs/aespa/*"))


def test_where_there_is_no_cuda_auto_is_the_cpu_and_other_accelerators_are_refused(
    aespa: CommandLine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is that of a Mac, where Lightning's auto is MPS."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(MPSAccelerator, "is_available", lambda: True)
    monkeypatch.setattr("lightning.fabric.accelerators.mps._get_all_available_mps_gpus", lambda: [0])
    status, out, err = aespa("fit", *small(model), "--trainer.accelerator", "mps")
    assert (status, out) == (2, "")
    assert re.search(r"trainer\.accelerator is mps, which is mps here: .*set it to cpu", err)
    options = ["--trainer.accelerator", "auto", "--trainer.fast_dev_run", "true"]
    assert aespa("fit", *small(model), *options)[0] == 0


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("fit", ["--tasks", "[piqa]"], r"tasks is a key of aespa-pl test alone"),
        ("test", ["--tasks", "[piqa]", "--task_limit", 0], r"task_limit is 0: expected a whole number"),
        (
            "compare",
            ["--compare.method", "rtn"],
            r"compare\.method is unknown: did you mean compare\.methods\?",
        ),
        ("compare", ["--bits", "[3]"], r"bits is unknown: did you mean compare\.bits\?"),
        ("fit", ["--bit", "3"], r"bit is unknown: --help shows the common keys, and --help SECTION all"),
        ("plan", ["--bits", "3"], r"bits is unknown: did you mean quantization\.bits\?"),
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
    status, _, err = aespa("test", "--model.pretrained", "packed", "--trainer.accelerator", "cpu", *NO_TEXTS)
    assert (status, err.count("\n")) == (2, 1)
    assert "data.evaluation.texts is empty: name at least one text, or tasks with --tasks" in err
    status, _, err = aespa("test", "--model.pretrained", "packed", "--quantization.bits", 7)
    assert (status, err.count("\n")) == (2, 1)
    assert "quantization.bits: model.pretrained is the packed model packed, measured as it is: leave" in err


@pytest.mark.parametrize(
    ("words", "segments"),
    [
        ([], 4),
        (["--data.calibration.source={c4: 0.9, wikitext2: 0.1}"], 10),
        (["--trainer.devices=4"], 8),
        (["--trainer.devices=4", "--data.calibration.segments=6"], 6),
    ],
)
def test_a_smoke_test_has_segments_of_all_texts_and_for_all_devices(words: list[str], segments: int) -> None:
    given = Arguments.read(["--model.pretrained=org/name", "--trainer.fast_dev_run=true", *words])
    parsed = AespaCLI(given, "fit")
    assert parsed.settings.data.calibration.segments == segments
