"""A key of the command line that would do nothing is refused, or said to do nothing."""

import re
from pathlib import Path

import pytest

from aespa_pl.commands.arguments import Arguments
from aespa_pl.commands.effect import without_effect
from aespa_pl.resolve import resolved
from aespa_pl.settings import PolishSettings, QuantizationSettings
from tests.cli.commands import CommandLine, Done, small


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--quantization.bits", 4),
            r"quantization\.bits is 4, but the run has 2 \(.*\): choose another run",
        ),
        (("--quantization", "{bits: 4}"), r"quantization\.bits is 4, but the run has 2"),
        (
            ("--quantization.bits_of", "{q_proj: 3}", "--quantization.method", "rtn"),
            r"bits_of is {'q_proj': 3}, but the run has {}; quantization\.method is rtn, but the run has",
        ),
    ],
)
def test_another_quantization_than_that_of_the_run_is_not_measured(
    aespa: CommandLine, unmeasured: Done, words: tuple[object, ...], message: str
) -> None:
    run = unmeasured.copied()
    status, out, err = aespa("test", "--ckpt_path", run, *words)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert re.search(message, err)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            [
                "--quantization.method=rtn",
                "--quantization.rounding.learning_rate=0.1",
                "--output.histograms=[q]",
            ],
            "quantization.rounding.learning_rate, output.histograms have no effect: no rounding is learned "
            "(method rtn)",
        ),
        (
            ["--quantization.method=aespa-fast", "--quantization.tuning={blocks: {epochs: 9}}"],
            "quantization.tuning.blocks.epochs has no effect: blocks are not tuned (method aespa-fast)",
        ),
        (
            ["--quantization.polish={passes: 3, enabled: false}", "--quantization.tuning.held_back=0.1"],
            "quantization.polish.passes has no effect: integers are not polished (method aespa-tuned)",
        ),
        (
            ["--quantization.method=optq", "--quantization.objective.end_loss=true"],
            "quantization.objective.end_loss has no effect: integers are neither polished nor learned "
            "(method optq)",
        ),
        (
            ["--quantization.method=rtn", "--quantization.damping=0.1", "--quantization.optq.rows=true"],
            "quantization.damping has no effect: no statistics are taken; quantization.optq.rows has no "
            "effect: OPTQ is not run (method rtn)",
        ),
        (
            ["--quantization.method=optq", "--quantization.objective.query_key_damping=0.1"],
            "quantization.objective.query_key_damping has no effect: Q and K have no objective of their own "
            "(method optq)",
        ),
        (
            [
                "--quantization.method=boa",
                "--quantization.objective.value_tokens=8",
                "--quantization.grid.max_rounds=2",
            ],
            "quantization.grid.max_rounds has no effect: there is no zeta (method boa)",
        ),
        (
            [
                "--quantization.method=omniquant",
                "--quantization.tuning.blocks.transformation_rate=0.1",
                "--quantization.tuning.blocks.penalty=0.1",
            ],
            "quantization.tuning.blocks.penalty has no effect: no rounding is learned in blocks "
            "(method omniquant)",
        ),
        (["--quantization.method=boa", "--quantization.objective.end_loss=true"], ""),
        (["--quantization.method=brecq", "--quantization.rounding.warmup=0.1"], ""),
        (["--quantization.method=aespa", "--quantization.rounding.iterations=9"], ""),
        (["--config=paper.yaml", "--quantization.method=rtn", "--quantization.polish.enabled=false"], ""),
    ],
)
def test_keys_of_steps_that_are_not_done_are_named(words: list[str], said: str) -> None:
    given = Arguments.read(words).with_configurations()
    values = {option.key: option.value for option in given.given() if not option.file}
    polish = PolishSettings(enabled=False) if "quantization.polish.enabled" in values else PolishSettings()
    settings = QuantizationSettings(values.get("quantization.method", "aespa-tuned"), polish=polish)
    assert without_effect(given, resolved(settings)) == said


def test_a_new_run_begins_with_the_keys_that_have_no_effect(aespa: CommandLine, model: Path) -> None:
    words = ("--quantization.method", "rtn", "--trainer.fast_dev_run", "true", "--model.revision", "v1")
    status, out, err = aespa("fit", *small(model), *words)
    assert (status, err) == (0, "")
    text = " ".join(out.split())
    assert "quantization.rounding.iterations has no effect: no rounding is learned (method rtn)" in text
    assert "model.revision has no effect: model.pretrained is no name on the hub" in text
