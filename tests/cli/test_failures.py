"""A run that fails on its way says in one line what failed, and how to go on."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from aespa_pl.commands import evaluate
from tests.cli.commands import LAST, NO_TEXTS, CommandLine, Done, small


def test_write_that_fails_in_a_checkpoint_is_one_line(
    aespa: CommandLine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 5440 vs 5334")

    arguments = [*small(model), *NO_TEXTS, "--output.checkpoint_iterations", 4]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fail)
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


def test_other_errors_keep_their_traceback_and_say_how_the_run_goes_on(
    aespa: CommandLine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("aespa_pl.walk.walk.Walk.quantize", fail)
    with pytest.raises(RuntimeError, match="a fault of ours") as fault:
        aespa("fit", *small(model), *NO_TEXTS)
    assert "continue with: aespa-pl fit --ckpt_path" in fault.value.__notes__[0]


def test_results_that_cannot_be_stored_are_printed_all_the_same(
    aespa: CommandLine, model: Path, finished: Done, caplog: pytest.LogCaptureFixture
) -> None:
    """The test runs as root, who may write anywhere: a folder has the name of the file."""
    run = finished.copied()
    (run / "test.json").mkdir()
    status, out, _ = aespa("test", *small(model))
    assert status == 0
    assert re.search(r"original +aespa \n", out)
    assert f"printed but not stored: cannot write to {run}" in caplog.text


@pytest.mark.parametrize(
    ("asked", "kinds"), [("true", ["original", "nearest", "quantized"]), ("false", ["original", "quantized"])]
)
def test_tasks_measure_round_to_nearest_where_it_is_asked_for(
    asked: str,
    kinds: list[str],
    aespa: CommandLine,
    model: Path,
    finished: Done,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = finished.copied()
    measured: list[tuple[Path, set[str]]] = []
    monkeypatch.setattr(evaluate, "find_tasks", lambda tasks: tasks)
    monkeypatch.setattr(evaluate, "refuse_too_large", lambda *_: None)

    def measure(folder: Path, *_: Any, device: Any, dtype: Any, **changes: Any) -> dict[str, Any]:
        measured.append((folder, {*changes}))
        return {"piqa": {"metric": "acc", "value": 0.1 * len(measured), "error": None, "items": 9}}

    monkeypatch.setattr(evaluate, "measure_tasks", measure)
    words = ("--tasks", "[piqa]", "--data.evaluation.round_to_nearest", asked)
    status, _, err = aespa("test", *small(model), *NO_TEXTS, *words)
    assert status == 0, err
    of_kind = {
        "original": (model, set()), "nearest": (model, {"change", "change_stem"}),
        "quantized": (run / "model", set()),
    }  # fmt: skip
    assert measured == [of_kind[kind] for kind in kinds]
    stored = json.loads((run / "test.json").read_text())["tasks"]
    assert {kind: round(10 * score["piqa"]["value"]) for kind, score in stored.items()} == {
        kind: number for number, kind in enumerate(kinds, 1)
    }


def test_a_model_too_large_for_tasks_is_refused_before_anything_is_measured(
    aespa: CommandLine, model: Path, finished: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished.copied()
    monkeypatch.setattr("aespa_pl.evaluation.tasks.free_bytes", lambda _device: 0)
    monkeypatch.setattr(evaluate, "compare_perplexities", lambda *_, **__: pytest.fail("measured"))
    status, _, err = aespa("test", *small(model), "--tasks", "[piqa]")
    assert (status, err.count("\n")) == (2, 1)
    assert "need the whole model in memory" in err
