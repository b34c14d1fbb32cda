"""The help explains every key and command, and comes without a large import."""

import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from aespa_pl import settings
from tests.cli.commands import CommandLine


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


@pytest.mark.parametrize("section", ["model", "data", "quantization", "output", "trainer"])
def test_help_of_a_section_explains_every_key(section: str, aespa: CommandLine) -> None:
    status, out, _ = aespa("fit", "--help", section)
    assert status == 0
    explained = re.findall(r"^  --([\w.]+)[^\n]*?(?:\n {8,}|  +)(?!\(type)([A-Za-z].*)$", out, re.M)
    named = {key for key, _ in explained}
    assert {key for key in KEYS if key.split(".")[0] == section} - named == set()
    assert {key.split(".")[0] for key in named} == {section}


@pytest.mark.parametrize("command", ["fit", "test", "plan", "compare"])
def test_help_is_one_screen_of_keys_that_exist(command: str, aespa: CommandLine) -> None:
    status, out, _ = aespa(command, "--help")
    assert status == 0
    assert 20 <= out.count("\n") <= 30
    assert max(map(len, out.splitlines())) <= 110
    named = set(re.findall(r"^  --([\w.]+)", out, re.M))
    assert named <= {
        *KEYS, "config", "print_config", "tasks", "trainer.accelerator", "trainer.devices",
        "trainer.fast_dev_run", "trust_run", "seed_everything", "plan.device", "compare.methods",
        "compare.bits", "compare.formats", "compare.seeds",
    }  # fmt: skip


def test_help_of_an_unknown_section_is_refused(aespa: CommandLine) -> None:
    status, _, err = aespa("fit", "--help", "quantizatoin")
    assert (status, err.count("\n")) == (2, 1)
    assert "there is no such section: did you mean quantization?" in err
    out = aespa("fit", "--help", "quantization.tuning")[1]
    assert "--quantization.tuning.blocks.epochs" in out
    assert "--quantization.bits" not in out


def test_help_behind_other_options_is_that_of_the_command(aespa: CommandLine) -> None:
    status, out, _ = aespa("fit", "--config", "quickstart_w2.yaml", "--help")
    assert status == 0
    assert out == aespa("fit", "--help")[1]


def test_a_command_s_own_keys_are_in_its_help(aespa: CommandLine) -> None:
    assert "--compare.methods" in aespa("compare", "--help", "compare")[1]
    assert "--plan.device" in aespa("plan", "--help", "plan")[1]


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
        (["fit", "--help"], r"--model\.pretrained"),
        (["fti"], r"fti is no command: did you mean fit\?"),
        (["quantize"], r"quantize is no command: expected one of fit, test, compare, plan"),
        (["fit", "--quantization.bit", "3"], r"did you mean quantization\.bits"),
        (["plan"], r"model\.pretrained is missing"),
    ],
)
def test_nothing_large_is_imported_for_an_answer(words: list[str], expected: str) -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT, *words], capture_output=True, text=True, check=False)
    assert re.search(expected, done.stdout + done.stderr)
    assert done.stderr.splitlines()[-1] == "[]"
    assert len(done.stdout.splitlines()) < 65  # a screen


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["report"], r"pl: a run is missing: give its folder \(NAME/version_N\), or last$"),
        (["export", "last"], r"pl: --format is missing: one of hf, compressed-tensors, awq, gptq, gguf$"),
        (["export"], r"pl: a run is missing: .*, or last; --format is missing: one of"),
        (
            ["test", "--model.pretrained", "m", "--print_config"],
            r"print_config is a key of aespa-pl fit alone",
        ),
        (["plan", "--print_config"], r"print_config is a key of aespa-pl fit alone"),
        (["fit", "--trust_run", "maybe"], r"pl: trust_run is maybe: expected true or false$"),
        (["export", "last", "--fromat", "gguf"], r"--fromat is unknown: did you mean --format\?$"),
        (
            ["export", "last", "--container-bits", "8"],
            r"--container-bits is unknown: did you mean --container",
        ),
        (["report", "last", "--colour", "red"], r"--colour is unknown: expected one of --output, --figures"),
        (["export", "last", "--format", "ggml"], r"--format is ggml: expected one of hf, .*, gptq, gguf"),
    ],
)
def test_missing_or_unknown_word_is_named(words: list[str], message: str, aespa: CommandLine) -> None:
    status, out, err = aespa(*words)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert re.search(message, err)


def test_keys_that_the_walk_decides_are_not_offered(aespa: CommandLine) -> None:
    out = aespa("fit", "--help", "trainer")[1]
    assert "--trainer.log_every_n_steps" in out
    for key in ("max_steps", "max_epochs", "overfit_batches"):
        assert f"--trainer.{key}" not in out


def test_help_of_report_shows_runs_with_spaces_between_them(aespa: CommandLine) -> None:
    status, out, _ = aespa("report", "--help")
    assert status == 0
    assert re.search(r"^ +RUN \[RUN \.\.\.\]$|\] RUN \[RUN \.\.\.\]$", out, re.M)
