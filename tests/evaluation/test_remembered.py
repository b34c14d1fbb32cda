"""A remembered perplexity is the one that was measured on the same, or there is none."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import aespa_pl
from aespa_pl.commands import evaluate
from aespa_pl.commands.job import Job
from aespa_pl.distributed.processes import ALONE
from aespa_pl.errors import UserError
from aespa_pl.evaluation.perplexity import perplexity
from aespa_pl.models.streamed import StreamedModel
from aespa_pl.progress import WalkProgress
from aespa_pl.settings import QuantizationSettings
from tests.jobs import embedded, prepared

TOKENS = torch.arange(12).view(3, 4)


def test_all_that_a_perplexity_depends_on_makes_another_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = prepared(embedded("opt", cache=tmp_path))
    other = replace(job, model=replace(job.model, dtype="float16"))
    keys = [
        evaluate.measured_on(job, "original", TOKENS),
        *(evaluate.measured_on(job, "original", t) for t in (TOKENS + 1, TOKENS[:2], TOKENS.view(2, 6))),
        evaluate.measured_on(job, "nearest", TOKENS),
        evaluate.measured_on(other, "original", TOKENS),
        evaluate.measured_on(replace(job, device=torch.device("meta")), "original", TOKENS),
    ]
    monkeypatch.setattr(Job, "model_fingerprint", "another model")
    keys.append(evaluate.measured_on(job, "original", TOKENS))
    monkeypatch.setattr(aespa_pl, "__version__", "0.0.0")
    keys.append(evaluate.measured_on(job, "original", TOKENS))
    assert len({json.dumps(key) for key in keys}) == len(keys)
    assert evaluate.measured_on(job, "original", TOKENS.clone()) == keys[-1]


def test_only_the_quantized_model_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second command, with one more text, runs what the first did not."""
    job = prepared(embedded("opt", cache=tmp_path))
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
    job = prepared(embedded("opt", cache=tmp_path))
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
    job = prepared(embedded("opt", cache=tmp_path))
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
