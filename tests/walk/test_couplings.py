"""Objectives that know the end loss: what is looked at before the walk, and what it brings."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from aespa_pl.data.texts import EMBEDDED
from aespa_pl.errors import UserError
from aespa_pl.run.journal import Run
from aespa_pl.walk import couplings
from tests.walk.by_hand import Walked
from tests.walks import BLOCKS, same_files, walk

FAST = {"rounding.learn": "none", "polish.enabled": True}
KNOWING = {**FAST, "objective.end_loss": True}


class StoppedError(Exception):
    """Ends a walk where a process would be killed."""


def trained() -> tuple[PreTrainedModel, Tensor, Tensor]:
    """Return a trained model, calibration segments and others, ``[segments, 128]``."""
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED / "llama", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED / "llama")
    texts = ((EMBEDDED / f"{name}.txt").read_text(encoding="utf-8") for name in ("calibration", "heldout"))
    ids = [tokenizer(text, return_tensors="pt").input_ids[0] for text in texts]
    return model.requires_grad_(requires_grad=False), *(one[: 24 * 128].view(-1, 128) for one in ids)


def divergence(original: PreTrainedModel, quantized: PreTrainedModel, ids: Tensor) -> float:
    expected, found = (model(ids, use_cache=False).logits.log_softmax(-1) for model in (original, quantized))
    return float((expected.exp() * (expected - found)).sum(-1).mean())


def test_the_model_diverges_less_where_objectives_know_the_end_loss(tmp_path: Path) -> None:
    model, ids, held_out = trained()
    found = {}
    for name, changes in (("plain", FAST), ("knowing", KNOWING)):
        settings = {**changes, "bits": 2, "input_correction": 0.5}
        quantized = walk("llama", tmp_path / name, settings, model=model, ids=ids)
        found[name] = divergence(model, quantized.exported(), held_out)
    assert found["knowing"] < 0.95 * found["plain"]


@pytest.mark.parametrize("name", ["llama-grouped", "opt", "bloom", "mixtral"])
def test_each_family_has_other_integers_and_keeps_no_files(name: str, walked: Walked) -> None:
    plain, knowing = (walked(name, c) for c in (FAST, KNOWING))
    for p in knowing.layout.projections:
        same = torch.equal(*(q.file(0)[f"{p.name}.integers"] for q in (plain, knowing)))
        assert same == (p.name in ("v_proj", "value") or p.expert is not None), p.name
    assert not knowing.run.couplings_folder.exists()
    assert not plain.run.couplings_folder.exists()


def test_a_continued_run_reads_what_was_looked_at_and_has_the_same_bits(
    walked: Walked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = walked("llama", KNOWING)
    finish = Run.finish_block

    def stop(run: Run, index: int, *arguments: Any) -> None:
        finish(run, index, *arguments)
        raise StoppedError

    monkeypatch.setattr(Run, "finish_block", stop)
    with pytest.raises(StoppedError):
        walk("llama", tmp_path / "stopped", KNOWING)
    monkeypatch.undo()
    run = Run.open(tmp_path / "stopped" / "runs" / "version_0")
    assert list(run.blocks) == [0]
    assert len(list(run.couplings_folder.iterdir())) == BLOCKS
    monkeypatch.setattr(couplings, "couplings", None)  # nothing is looked at again
    same_files(whole, walk("llama", tmp_path / "stopped", KNOWING, run=run))
    assert not run.couplings_folder.exists()  # block 0's file had been left


def test_what_is_damaged_is_computed_again(
    walked: Walked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = walked("llama", KNOWING)
    read = couplings.read

    def stop(context: Any, index: int) -> Any:
        if index == BLOCKS - 1:
            raise StoppedError
        return read(context, index)

    monkeypatch.setattr(couplings, "read", stop)
    with pytest.raises(StoppedError):
        walk("llama", tmp_path / "damaged", KNOWING)
    monkeypatch.undo()
    run = Run.open(tmp_path / "damaged" / "runs" / "version_0")
    file = run.coupling_file(BLOCKS - 1)
    file.write_bytes(file.read_bytes()[:-100])
    same_files(whole, walk("llama", tmp_path / "damaged", KNOWING, run=run))


def test_a_file_with_a_wrong_number_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = couplings.prepare

    def damaging(context: Any, *arguments: Any) -> None:
        prepare(context, *arguments)
        file = context.run.coupling_file(0)
        file.write_bytes(file.read_bytes()[:-64] + b"\xff" * 64)

    monkeypatch.setattr(couplings, "prepare", damaging)
    with pytest.raises(UserError, match=r"end_loss.*is damaged .*: remove it, and continue the run"):
        walk("llama", tmp_path, KNOWING)


@pytest.mark.parametrize("method", ["rtn", "optq", "awq"])
def test_methods_whose_rows_are_independent_look_at_nothing(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(couplings, "couplings", None)
    walk("llama", tmp_path, {"method": method, "objective.end_loss": True})
