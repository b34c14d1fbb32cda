"""quantization.target chooses types or bits for a size, which the file then has."""

import json
import signal
from pathlib import Path

import pytest
import yaml

from tests.cli.commands import LAST, NO_TEXTS, CommandLine
from tests.forks import Forks

BASE = (
    "--model.pretrained", "embedded:llama", "--data.calibration.source", "embedded",
    "--data.calibration.segments", 4, "--data.calibration.segment_length", 32,
    *NO_TEXTS, "--quantization.method", "rtn", "--trainer.accelerator", "cpu",
)  # fmt: skip
TYPED = ("--quantization.format", "auto")


def test_a_file_has_the_size_that_was_predicted_and_asked_for(aespa: CommandLine) -> None:
    words = (*BASE, *TYPED, "--quantization.types", "{'0.q_proj': Q8_0, embedding: IQ4_NL}")
    status, out, err = aespa("fit", *words, "--quantization.target", "420 kB")
    assert (status, err) == (0, "")
    assert "predicted KL divergence" in out
    run = Path(out.splitlines()[-1])
    status, _, err = aespa("export", run, "--format", "gguf", "--verify", "bytes")
    assert (status, err) == (0, "")
    size = (run / "export" / "gguf" / "model.gguf").stat().st_size
    mixture = json.loads((run / "mixture.json").read_text())
    assert size == mixture["bytes"]
    assert 0.99 * 420_000 < size <= 420_000
    types = yaml.safe_load((run / "config.yaml").read_text())["quantization"]["types"]
    assert types == mixture["chosen"]
    assert (types["0.q_proj"], types["embedding"]) == ("Q8_0", "IQ4_NL")
    assert "2.down_proj" in types
    assert len(set(types.values())) > 2


def test_the_divergence_is_measured_beside_the_prediction(aespa: CommandLine) -> None:
    texts = ("--data.evaluation.texts", "[embedded]", "--data.evaluation.max_segments", 4)
    few = ("--data.evaluation.segment_length", 32, "--data.evaluation.round_to_nearest", "false")
    status, out, err = aespa("fit", *BASE, *TYPED, "--quantization.target", "500 kB", *texts, *few)
    assert (status, err) == (0, "")
    assert "KL, embedded" in out
    run = Path(out.splitlines()[-1])
    measured = json.loads((run / "metrics.json").read_text())["divergence"]["quantized"]["embedded"]["mean"]
    assert measured > 0
    assert aespa("report", run)[0] == 0
    assert f"Measured are {measured:.3g} on embedded" in (run / "report" / "report.html").read_text()
    status, out, err = aespa("fit", "--ckpt_path", run)  # finished
    assert (status, err) == (0, "")
    assert "KL, embedded" in out


def test_uniform_grids_get_bits_for_a_mean(aespa: CommandLine) -> None:
    status, out, err = aespa(
        "fit", *BASE, "--quantization.target", 3.5, "--quantization.bits_of", "{0.q_proj: 16}"
    )
    assert (status, err) == (0, "")
    run = Path(out.splitlines()[-1])
    stored = yaml.safe_load((run / "config.yaml").read_text())["quantization"]
    bits_of = stored["bits_of"]
    assert len(bits_of) == 21
    assert bits_of["0.q_proj"] == 16  # stays as it was asked for
    assert min(bits_of.values()) < 3.5 < max(b for b in bits_of.values() if b < 16)
    assert stored["bits"] in (3, 4)  # of most projections, which the learning rates are for
    status, _, err = aespa("test", "--ckpt_path", run, "--data.evaluation.texts", "[embedded]")
    assert (status, err) == (0, "")
    size = json.loads((run / "test.json").read_text())["size"]["quantized"]
    assert 3.4 < size["bits_per_weight"] <= 3.5
    assert size["bytes"] == pytest.approx(json.loads((run / "mixture.json").read_text())["bytes"], abs=30)
    status, _, err = aespa("export", run, "--format", "compressed-tensors")
    assert (status, err.count("\n")) == (2, 1)
    assert "--container_bits" in err


@pytest.mark.parametrize("form", [TYPED, ()])
def test_the_configuration_of_a_run_has_its_size_and_is_refused_for_a_smaller_one(
    aespa: CommandLine, form: tuple[str, ...]
) -> None:
    target, less = ("400 kB", "390 kB") if form else (4, 3.5)
    status, out, _ = aespa("fit", *BASE, *form, "--quantization.target", target)
    assert status == 0
    config = Path(out.splitlines()[-1]) / "config.yaml"
    status, out, err = aespa("fit", "--config", config)
    assert (status, err) == (0, "")
    assert "nothing is chosen" in out
    status, _, err = aespa("fit", "--config", config, "--quantization.target", less)
    assert (status, err.count("\n")) == (2, 1)
    assert "from the configuration, and it is chosen for this size" in err


def test_a_run_may_quantize_a_single_matrix(aespa: CommandLine) -> None:
    words = ("--quantization.bits_of", "{'*': 16, 0.v_proj: 8}", "--trainer.fast_dev_run", "true")
    status, out, err = aespa("fit", *BASE, *words)
    assert (status, err) == (0, "")
    assert "8 bits, asymmetric, per channel: " in out


def test_plan_shows_the_types_of_each_projection(aespa: CommandLine) -> None:
    status, out, err = aespa("plan", *BASE, *TYPED, "--quantization.target", "400 kB")
    assert (status, err) == (0, "")
    assert "down_proj: " in out
    assert "a file of 0.40 MB" in out
    assert not list(Path().rglob("journal.json"))


@pytest.mark.parametrize(
    ("target", "words", "message"),
    [
        ("3 apples", TYPED, "quantization.target is 3 apples: expected a size such as 3.5 GB"),
        ("40 kB", TYPED, "quantization.target is 40 kB, and this model can have 0.265 to "),
        ("1.5", (), "quantization.target is 1.5, and this model can have 2."),
        ("400 kB", ("--quantization.format", "Q4_0"), "set quantization.format auto"),
        (None, TYPED, "quantization.format is auto, which chooses types for a size"),
    ],
)
def test_targets_that_cannot_be_are_refused_in_one_line(
    aespa: CommandLine, target: str | None, words: tuple[object, ...], message: str
) -> None:
    given = () if target is None else ("--quantization.target", target)
    status, _, err = aespa("fit", *BASE, *words, *given)
    assert (status, err.count("\n")) == (2, 1), err
    assert message in err
    assert not list(Path().rglob("journal.json"))


def test_a_killed_run_goes_on_with_the_types_that_were_chosen(
    aespa: CommandLine, forks: Forks, tmp_path: Path
) -> None:
    words = [str(word) for word in (*BASE, *TYPED, "--quantization.target", "400 kB")]
    method, runs = ["--quantization.method", "optq"], tmp_path / "lightning_logs"
    run = runs / "aespa/version_0"
    killed = forks.run(
        ["fit", *words, *method, f"--output.folder={runs}"], signal.SIGKILL, f"{run}/blocks/block_000*"
    )
    assert killed.status == -signal.SIGKILL, killed.text
    before = (run / "config.yaml").read_text()
    # with the settings of the first command, in which nothing is chosen, and with the run alone
    for arguments in ([*words, *method, "--ckpt_path", "last"], ["--ckpt_path", run]):
        status, out, err = aespa("fit", *arguments)
        assert (status, err) == (0, "")
        assert "Choosing" not in out
        assert "predicted KL" not in out
    assert (
        yaml.safe_load(before)["quantization"]
        == (yaml.safe_load((run / "config.yaml").read_text())["quantization"])
    )
    for key, value in (("target", 5), ("types", "{0.q_proj: Q8_0}")):
        other = (f"--quantization.{key}", value)
        status, _, err = aespa("fit", *words, *method, *other, "--ckpt_path", "last")
        assert (status, err.count("\n")) == (2, 1)
        assert f"quantization.{key}" in err


def test_round_to_nearest_has_the_types_of_the_run_in_all_matrices(aespa: CommandLine) -> None:
    """What is shown as round-to-nearest is nearly method rtn of the same types, which has the same bytes."""
    words = ("--quantization.format", "Q2_0", "--data.evaluation.texts", "[embedded]")
    status, out, err = aespa("fit", *BASE, *words, "--data.evaluation.max_segments", 2)
    assert (status, err) == (0, "")
    run = Path(out.splitlines()[-1])
    metrics = json.loads((run / "metrics.json").read_text())
    found = {kind: values["embedded"] for kind, values in metrics["perplexity"].items()}
    assert found["nearest"] == pytest.approx(found["quantized"], rel=0.02)
    assert found["original"] < 0.8 * found["nearest"]
    assert metrics["size"]["quantized"]["bytes"] < 0.2 * metrics["size"]["original"]["bytes"]


@pytest.mark.parametrize("form", ["hf", "compressed-tensors"])
def test_transformers_gives_the_logits_of_a_bloom_run(form: str, aespa: CommandLine) -> None:
    """Last bits of its products differ with their length, so the run answers on as many tokens."""
    words = (
        *BASE, "--model.pretrained", "embedded:bloom",
        "--quantization.bits", 4, "--quantization.group_size", 32,
    )  # fmt: skip
    assert aespa("fit", *words)[::2] == (0, "")
    status, out, err = aespa("export", "last", "--format", form)
    assert (status, err) == (0, "")
    assert "logits equal" in out


def test_a_smoke_test_chooses_anew(aespa: CommandLine) -> None:
    """Also where there is no run yet but an earlier smoke test, which is not what is continued."""
    smoke = (*BASE, *TYPED, "--trainer.fast_dev_run", "true", *LAST)
    assert aespa("fit", *smoke, "--quantization.target", "420 kB")[0] == 0
    status, _, err = aespa("fit", *smoke, "--quantization.target", "1 kB")
    assert status == 2
    assert "quantization.target is 1 kB" in err
