"""A configuration file is read as it was printed, and its mistakes are told together."""

import re
from pathlib import Path

import pytest
import yaml

from aespa_pl.commands.arguments import read_configuration
from aespa_pl.methods import METHODS
from aespa_pl.report.stored import flat
from tests.cli.commands import CONFIGS, NO_TEXTS, CommandLine, Done, small

MODELS = [path for path in CONFIGS if path.stem != "paper"]


@pytest.mark.parametrize("path", MODELS, ids=[path.stem for path in MODELS])
def test_shipped_configurations_are_valid_and_the_paper_changes_the_algorithm_alone(
    aespa: CommandLine, path: Path
) -> None:
    """What is ours is off, lambda is the paper's; the rest is the model's own."""
    status, out, _ = aespa("fit", "--config", path, "--print_config")
    assert status == 0
    method = yaml.safe_load(out)["quantization"]["method"]
    nulls = [key for key, value in flat(yaml.safe_load(out)["quantization"]).items() if value is None]
    assert all(
        key in ("group_size", "target") or key.endswith("_rate") for key in nulls
    )  # the model isn't here
    given = ("--config", path.name, "--quantization.method", "aespa", "--print_config")
    printed = yaml.safe_load(aespa("fit", *given)[1])
    quantization = printed["quantization"]
    assert method in METHODS
    assert quantization["bits"] in (2, 3, 4)
    quantization["polish"]["enabled"] = False
    quantization |= {"input_correction": 0.0, "damping": 0.01}
    quantization["objective"] |= {"query_key_damping": 0.0, "value_tokens": 0}
    quantization["rounding"] |= {"keep_best": False, "penalty_other": 1.5}
    for name in ("blocks", "model"):
        quantization["tuning"][name]["enabled"] = False
    printed["output"]["name"] = "paper"
    both = ("--config", path.name, "--config", "paper.yaml")
    assert yaml.safe_load(aespa("fit", *both, "--print_config")[1]) == printed


def test_printed_configuration_is_what_a_run_stores(
    aespa: CommandLine, model: Path, unmeasured: Done
) -> None:
    words = (*small(model), *NO_TEXTS)
    out = aespa("fit", *words, "--print_config")[1]
    assert out == (unmeasured.run / "config.yaml").read_text()


@pytest.mark.parametrize("target", [("4",), ("0.6 MB", "--quantization.format", "auto")])
def test_printed_configuration_leaves_a_choice_to_the_run(
    target: tuple[str, ...], aespa: CommandLine, caplog: pytest.LogCaptureFixture
) -> None:
    """What stands in for it until then would be run as it is."""
    given = [
        "--model.pretrained", "embedded:llama", "--data.calibration.segment_length", 32,
        "--data.evaluation.segment_length", 32, "--quantization.method", "aespa-tuned",
    ]  # fmt: skip
    status, out, err = aespa("fit", *given, "--quantization.target", *target, "--print_config")
    assert status == 0, err
    printed = yaml.safe_load(out)["quantization"]
    assert (printed["types"], printed["bits_of"]) == ({}, {})
    assert printed["tuning"]["model"]["integer_rate"] is None
    assert "follow from what is chosen" in caplog.text


def test_learning_rates_follow_the_bits_that_a_printed_configuration_is_run_with(aespa: CommandLine) -> None:
    words = ("--config", "quickstart_w2.yaml", "--quantization.tuning.blocks.scale_rate", "0.001")
    Path("two.yaml").write_text(aespa("fit", *words, "--print_config")[1])
    for bits in ((), ("--quantization.bits", 4)):
        printed = yaml.safe_load(aespa("fit", "--config", "two.yaml", *bits, "--print_config")[1])
        tuning = printed["quantization"]["tuning"]
        assert tuning["blocks"]["scale_rate"] == 0.001
        assert tuning["blocks"]["integer_rate"] is tuning["model"]["integer_rate"] is None
        assert tuning["blocks"]["epochs"] is not None


def test_printed_configuration_is_one(aespa: CommandLine) -> None:
    out = aespa("fit", "--config", CONFIGS[0], "--print_config")[1]
    Path("again.yaml").write_text(out)
    again = aespa("fit", "--config", "again.yaml", "--print_config")[1]
    assert yaml.safe_load(again) == yaml.safe_load(out)


def test_a_section_that_is_given_twice_is_refused_with_both_lines(aespa: CommandLine) -> None:
    Path("own.yaml").write_text("a: &a {bits: 2}\nb: {<<: *a, bits: 3}\n")
    assert read_configuration(Path("own.yaml"))["b"] == {"bits": 3}
    Path("own.yaml").write_text("model: {pretrained: m}\nquantization:\n  bits: 2\n\nquantization: {}\n")
    status, out, err = aespa("fit", "--config", "own.yaml")
    assert (status, out) == (2, "")
    assert err == (
        "aespa-pl: config: own.yaml has quantization in line 2 and in line 5: put both under one\n"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\x00", r"wrong\.yaml is no YAML"),
        (b"model: [", r"wrong\.yaml is no YAML"),
        (b"[" * 5000, r"wrong\.yaml is nested too deeply"),
        (b"- model", r"wrong\.yaml has no keys"),
        (b"quantization: 3\n", r"quantization is a section, not a value: .*\(wrong\.yaml\)"),
        (
            b"quantization: {bits: 1, grup_size: 4}\ndata: {batch_size: 0}\n",
            r"bits is 1: expected a .* 2 to 8 \(wrong\.yaml\); .*grup_size is unknown: did you mean "
            r"quantization\.group_size\? \(wrong\.yaml\); data\.batch_size is 0: .*; model\.pretrained is",
        ),
    ],
)
def test_mistakes_in_a_file_are_told_together(aespa: CommandLine, content: bytes, message: str) -> None:
    Path("wrong.yaml").write_bytes(content)
    status, out, err = aespa("fit", "--config", "wrong.yaml")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert re.search(message, err)


def test_another_method_beside_the_configuration_of_a_run_is_refused(
    aespa: CommandLine, unmeasured: Done
) -> None:
    """It would be the run's own method under another name, because nothing is null there."""
    given = ("--config", unmeasured.run / "config.yaml")
    refused = r"config\.yaml is the configuration of a run .*, so {} would give aespa's result: take the"
    for command, other in (
        ("fit", ("--quantization.method", "rtn")),
        ("plan", ("--config", "other.yaml")),
        ("compare", ("--compare.methods", "[aespa, rtn]")),
    ):
        Path("other.yaml").write_text("quantization: {method: rtn}\n")
        status, out, err = aespa(command, *given, *other)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert re.search(refused.format("rtn"), err)
    assert aespa("fit", *given, "--quantization.method", "aespa", "--print_config")[0] == 0
    overlay = yaml.safe_load((unmeasured.run / "config.yaml").read_text())
    overlay["quantization"]["rounding"]["keep_best"] = None  # one key is left to the method
    Path("other.yaml").write_text(yaml.safe_dump(overlay))
    words = ("--config", "other.yaml", "--quantization.method", "rtn", "--print_config")
    assert aespa("fit", *words)[0] == 0


def test_a_part_of_a_section_may_be_given_whole(aespa: CommandLine) -> None:
    parts = ("--quantization.rounding", "{iterations: 7}", "--quantization.tuning.blocks", "{epochs: 3}")
    words = ("--config", "quickstart_w2.yaml", *parts, "--print_config")
    status, out, err = aespa("fit", *words)
    assert status == 0, err
    printed = yaml.safe_load(out)["quantization"]
    assert (printed["rounding"]["iterations"], printed["tuning"]["blocks"]["epochs"]) == (7, 3)
