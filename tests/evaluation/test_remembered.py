"""A remembered perplexity is the one that was measured on the same, or there is none."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save
from torch import Tensor

import aespa_pl
from aespa_pl.commands import evaluate
from aespa_pl.commands.job import Job
from aespa_pl.distributed.processes import ALONE
from aespa_pl.errors import UserError
from aespa_pl.evaluation.perplexity import measured_on, perplexity, recall, remember
from aespa_pl.models.streamed import StreamedModel
from aespa_pl.progress import WalkProgress
from aespa_pl.settings import (
    CalibrationSettings,
    DataSettings,
    EvaluationSettings,
    ModelSettings,
    OutputSettings,
    QuantizationSettings,
    Settings,
)

TOKENS = torch.arange(12).view(3, 4)
MODEL = {"model": "abc", "rounded": None, "dtype": "float32", "device": "cpu"}


def test_what_was_measured_is_recalled_to_the_last_digit(tmp_path: Path) -> None:
    key = measured_on(MODEL, TOKENS)
    assert recall(tmp_path, key) is None
    remember(tmp_path, key, 1 / 3 + 31)
    assert recall(tmp_path, measured_on(dict(MODEL), TOKENS.clone())) == 1 / 3 + 31


@pytest.mark.parametrize(
    "change", [{"model": "abd"}, {"rounded": {"bits": 2}}, {"dtype": "float16"}, {"device": "cuda"}], ids=str
)
def test_another_model_or_setting_is_measured_anew(tmp_path: Path, change: dict[str, object]) -> None:
    remember(tmp_path, measured_on(MODEL, TOKENS), 3.5)
    assert recall(tmp_path, measured_on({**MODEL, **change}, TOKENS)) is None


@pytest.mark.parametrize("tokens", [TOKENS + 1, TOKENS[:2], TOKENS.view(2, 6)], ids=str)
def test_another_text_is_measured_anew(tmp_path: Path, tokens: Tensor) -> None:
    remember(tmp_path, measured_on(MODEL, TOKENS), 3.5)
    assert recall(tmp_path, measured_on(MODEL, tokens)) is None


def test_another_version_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(tmp_path, measured_on(MODEL, TOKENS), 3.5)
    monkeypatch.setattr(aespa_pl, "__version__", "0.0.0")
    assert recall(tmp_path, measured_on(MODEL, TOKENS)) is None


def test_an_entry_that_is_damaged_or_edited_is_measured_anew(tmp_path: Path) -> None:
    key = measured_on(MODEL, TOKENS)
    remember(tmp_path, key, 3.5)
    (path,) = (tmp_path / "perplexities").glob("*.safetensors")
    whole = path.read_bytes()
    other = {"perplexities": torch.tensor([3.4], dtype=torch.float64)}
    for content in (b"", b"{", whole[:-1], save(other), whole.replace(b"abc", b"abd")):
        path.write_bytes(content)
        assert recall(tmp_path, key) is None
    path.write_bytes(whole)
    assert recall(tmp_path, key) == 3.5


def test_a_cache_that_can_not_be_written_to_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    key = measured_on(MODEL, TOKENS)
    remember(tmp_path / "file", key, 3.5)
    assert recall(tmp_path / "file", key) is None


def job_with_cache(folder: Path) -> Job:
    data = DataSettings(
        CalibrationSettings("embedded", segment_length=16),
        EvaluationSettings(["embedded"], segment_length=16),
        cache=str(folder),
    )
    model = ModelSettings("embedded:opt")
    settings = Settings(model, data, QuantizationSettings(), OutputSettings())
    return Job.prepare(settings, torch.device("cpu"))


def test_only_the_quantized_model_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second command, with one more text, runs what the first did not."""
    job = job_with_cache(tmp_path)
    segments = torch.randint(3, 100, (3, 16))
    run: list[tuple[str, ...]] = []
    measure = perplexity

    def counted(source: StreamedModel, texts: dict[str, Tensor], **options: Any) -> Any:
        run.append(tuple(texts))
        return measure(source, texts, **options)

    monkeypatch.setattr(evaluate, "perplexity", counted)

    def compare(
        texts: dict[str, Tensor], settings: QuantizationSettings | None = None
    ) -> dict[str, dict[str, float]]:
        """With settings of the quantization, they are others, and only the references are measured."""
        return evaluate.compare_perplexities(
            job if settings is None else replace(job, quantization=settings),
            job.pretrained.folder,  # stands for a quantized model
            texts,
            ["original", "nearest", *(["quantized"] if settings is None else [])],
            progress=WalkProgress(Console(quiet=True)),
            world=ALONE,
        )

    first = compare({"a": segments})
    assert run == [("a",)] * 3
    run.clear()
    second = compare({"b": segments[:2], "a": segments})
    assert run == [("b",), ("b",), ("b", "a")]
    assert {kind: values["a"] for kind, values in second.items()} == {
        kind: values["a"] for kind, values in first.items()
    }
    assert [list(values) for values in second.values()] == [["b", "a"]] * 3
    run.clear()
    third = compare({"a": segments}, QuantizationSettings(bits=3))
    assert run == [("a",)]  # nearest, with other bits
    assert third["original"]["a"] == first["original"]["a"]
    assert third["nearest"]["a"] != first["nearest"]["a"]
    run.clear()
    fourth = compare({"a": segments}, QuantizationSettings(bits=3, types={"embedding": "Q2_0"}))
    assert run == [("a",)]  # with an embedding of 2 bits
    assert fourth["original"]["a"] == first["original"]["a"]
    assert fourth["nearest"]["a"] != third["nearest"]["a"]


def test_nearest_rounding_that_is_no_number_is_left_out_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nearest rounding is only a comparison: it must not end a quantization that is finished."""
    job = job_with_cache(tmp_path)
    measured = iter([{"a": 3.0, "b": 4.0}, {"a": math.inf, "b": 9.0}, {"a": 3.5, "b": 4.5}])
    monkeypatch.setattr(evaluate, "perplexity", lambda *_, **__: next(measured))
    found = evaluate.compare_perplexities(
        job,
        job.pretrained.folder,
        {"a": TOKENS, "b": TOKENS + 1},
        ["original", "nearest", "quantized"],
        progress=WalkProgress(Console(width=200)),
        world=ALONE,
    )
    assert found == {
        "original": {"a": 3.0, "b": 4.0},
        "nearest": {"b": 9.0},
        "quantized": {"a": 3.5, "b": 4.5},
    }
    assert "round-to-nearest has no finite perplexity on a" in capsys.readouterr().out


@pytest.mark.parametrize("broken", ["original", "quantized"])
def test_another_model_whose_perplexity_is_no_number_is_refused_by_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    job = job_with_cache(tmp_path)
    values = iter([{"a": math.inf if kind == broken else 3.0} for kind in ("original", "quantized")])
    monkeypatch.setattr(evaluate, "perplexity", lambda *_, **__: next(values))
    with pytest.raises(UserError, match=f"the perplexity of the {broken} model on a is not a finite"):
        evaluate.compare_perplexities(
            job,
            job.pretrained.folder,
            {"a": TOKENS},
            ["original", "quantized"],
            progress=WalkProgress(Console(quiet=True)),
            world=ALONE,
        )
