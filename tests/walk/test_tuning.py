"""Tuning in a walk: what is stored is what was evaluated, on streams that are the model's own."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from transformers import PreTrainedModel

from aespa_pl.models import family_of
from aespa_pl.resolve import resolved
from tests import massive, walks
from tests.walk.by_hand import Walked, check_export
from tests.walks import SEGMENTS, Quantized, walk

HELD = 2
BLOCKS_ONLY: dict[str, Any] = {
    "tuning.blocks.enabled": True,
    "tuning.blocks.epochs": 3,
    "tuning.blocks.integer_rate": 0.002,
    "tuning.blocks.bias_rate": 0.003,
    "tuning.held_back": 0.3,  # 2 of 6 segments
}
BOTH = BLOCKS_ONLY | {
    "tuning.model.enabled": True,
    "tuning.model.epochs": 2,
    "tuning.model.batch_size": 1,
    "tuning.model.integer_rate": 0.0,
}
LEARNED = {"tuning.model.epochs": 6, "tuning.model.integer_rate": 0.08}
"""So that the integers move in the end-to-end tuning as well."""
ROUNDED = {"method": "rtn"}
NEAREST = ROUNDED | {"tuning.blocks.enabled": False}


def hidden_states(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """Return what goes into each block, and what comes out of the last, by transformers itself."""
    seen: list[Tensor] = []
    blocks = model.get_submodule(family_of(model.config).blocks_path)

    def note(_module: Any, arguments: Any, options: Any) -> None:
        seen.append(arguments[0] if arguments else options["hidden_states"])

    handles = [b.register_forward_pre_hook(note, with_kwargs=True) for b in blocks]
    last = blocks[-1].register_forward_hook(
        lambda _m, _a, out: seen.append(out[0] if isinstance(out, tuple) else out)
    )
    with torch.no_grad():
        model(ids, use_cache=False)
    for handle in (*handles, last):
        handle.remove()
    return seen


def block_errors(found: Quantized) -> list[float]:
    """Return each exported block's error on the segments that were held back, in float64."""
    original = hidden_states(found.original, found.ids)
    quantized = hidden_states(found.exported(), found.ids)
    errors = []
    for wanted, mine in zip(original[1:], quantized[1:], strict=True):
        of_tokens: list[float] = []
        for a, b in zip(mine[-HELD:].double(), wanted[-HELD:].double(), strict=True):
            sizes = massive.divisors(b, a)
            of_tokens += [massive.power(e) / s for e, s in zip((a - b).tolist(), sizes, strict=True)]
        errors.append(sum(of_tokens) / len(of_tokens))
    return errors


def divergence(found: Quantized) -> float:
    """Return the exported model's divergence on the segments that were held back, in float64."""
    with torch.no_grad():
        p, q = (
            m(found.ids[-HELD:]).logits.double().log_softmax(-1) for m in (found.original, found.exported())
        )
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize(
    ("name", "correction"), [("llama-grouped", 0.0), ("opt", 0.0), ("bloom", 0.0), ("llama-grouped", 0.5)]
)
def test_the_error_in_the_journal_is_that_of_the_exported_block(
    name: str, correction: float, walked: Walked
) -> None:
    """So inputs and targets are the right streams at every block, and what is stored was evaluated."""
    found = walked(name, BLOCKS_ONLY | ({"input_correction": correction} if correction else {}))
    records = [found.journal["blocks"][str(i)]["tuning"] for i in range(walks.BLOCKS)]
    assert [r["error"] for r in records] == pytest.approx(block_errors(found), rel=1e-3)
    for record in records:
        assert record["error"] <= record["start_error"]
        assert record["finite"]
        assert record["epoch"] or not record["changed"]
    assert any(record["epoch"] for record in records)


@pytest.mark.parametrize("name", ["llama-grouped", "opt", "bloom"])
def test_the_divergence_in_the_journal_is_that_of_the_exported_model(name: str, walked: Walked) -> None:
    found = walked(name, BOTH)
    record = found.journal["tuned"]
    assert record["error"] == pytest.approx(divergence(found), rel=1e-3)
    assert record["error"] <= record["start_error"]
    assert record["seconds"].keys() == {"tuning the model"}
    assert record["seconds"]["tuning the model"] > 0
    before = walked(name, BLOCKS_ONLY)
    assert record["start_error"] == pytest.approx(divergence(before), rel=1e-3)
    for index in range(walks.BLOCKS):
        for key, tensor in before.file(index).items():
            if not key.endswith(".scale"):
                assert torch.equal(found.file(index)[key], tensor)


@pytest.mark.parametrize(
    ("name", "place"), [("llama-grouped", "memory"), ("llama-grouped", "disk"), ("bloom", "disk")]
)
def test_integers_that_the_model_learns_are_those_that_are_stored(
    name: str, place: str, walked: Walked
) -> None:
    some = NEAREST | {"bits_of": {"1.up_proj": 16, "1.dense": 16}}  # blocks of unequal size
    before = walked(name, BLOCKS_ONLY | some)
    found = walked(name, BOTH | LEARNED | some | {"tuning.model.blocks": place})
    record = found.journal["tuned"]
    assert record["error"] == pytest.approx(divergence(found), rel=1e-3)
    assert record["error"] < record["start_error"]
    changed, count = 0, 0
    for index in range(walks.BLOCKS):
        for key, tensor in before.file(index).items():
            if key.endswith(".integers"):
                changed += int((found.file(index)[key] != tensor).sum())
                count += tensor.numel()
    assert 0 < changed == pytest.approx(record["changed"] * count)


def test_the_exported_weights_are_scale_times_integer_minus_zero_point(walked: Walked) -> None:
    check_export(walked("llama-grouped", BOTH | LEARNED | NEAREST), bits=2)


def test_recomputing_blocks_changes_nothing(walked: Walked, tmp_path: Path) -> None:
    kept = walked("llama-grouped", BOTH)
    again = walk("llama-grouped", tmp_path, BOTH, recompute=True).exported().state_dict()
    for name, tensor in kept.exported().state_dict().items():
        assert torch.allclose(again[name], tensor, atol=1e-5)


@pytest.mark.parametrize("name", ["llama-grouped", "opt", "bloom"])
def test_blocks_that_are_read_whenever_they_run_train_to_the_same_bits(
    name: str, walked: Walked, tmp_path: Path
) -> None:
    fast = BOTH | NEAREST | {"tuning.model.epochs": 2}
    memory, disk = walked(name, fast), walk(name, tmp_path, fast | {"tuning.model.blocks": "disk"})
    start = walked(name, NEAREST).exported().state_dict()
    state = disk.exported().state_dict()
    for key, tensor in memory.exported().state_dict().items():
        assert torch.equal(state[key], tensor)
    assert not all(torch.equal(state[key], tensor) for key, tensor in start.items())


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_integers_that_are_not_trained_could_not_have_moved(bits: int, walked: Walked) -> None:
    """Their rate is 0 by default where the steps are too few, and then the rest learns the same."""
    given = BOTH | NEAREST | {"bits": bits, "tuning.model.integer_rate": None}
    moving, staying = (resolved(walks.changed(given), segments=n) for n in (None, SEGMENTS))
    rate = moving.tuning.model.integer_rate
    assert rate == pytest.approx(0.02 * (3 / (2**bits - 1)) ** 2)
    assert staying.tuning.model.integer_rate == 0
    enough = math.ceil(1 / rate / 2)  # in two epochs
    assert resolved(walks.changed(given), segments=enough).tuning.model.integer_rate == rate
    assert resolved(walks.changed(given), segments=enough - 1).tuning.model.integer_rate == 0
    with_rate = walked("llama-grouped", given | {"tuning.model.integer_rate": 1 / (2 * SEGMENTS)})
    without = walked("llama-grouped", given | {"tuning.model.integer_rate": 0.0}).exported().state_dict()
    start = walked("llama-grouped", NEAREST | {"bits": bits}).exported().state_dict()
    for key, tensor in with_rate.exported().state_dict().items():
        assert torch.allclose(without[key], tensor, rtol=1e-3, atol=1e-5), key
    assert not all(torch.equal(without[key], tensor) for key, tensor in start.items())


def test_mini_batches_of_blocks_on_disk_are_summed_segment_by_segment(tmp_path: Path) -> None:
    pairs = BOTH | NEAREST | {"tuning.model.epochs": 6, "tuning.model.batch_size": 2}
    memory = walk("llama-grouped", tmp_path / "memory", pairs).exported().state_dict()
    pairs |= {"tuning.model.blocks": "disk"}
    disk = walk("llama-grouped", tmp_path / "disk", pairs).exported().state_dict()
    for key, tensor in memory.items():  # Adam makes a step of a rounding error where a gradient is nearly 0
        assert torch.allclose(disk[key], tensor, rtol=0.02, atol=1e-3)


def test_hidden_states_on_disk_change_nothing(walked: Walked, tmp_path: Path) -> None:
    """A tuning and the correction have two streams of them."""
    changes = BOTH | {"input_correction": 0.5}
    memory = walked("opt", changes)
    disk = walk("opt", tmp_path, changes, hidden_folder=tmp_path / "hidden").exported().state_dict()
    for name, tensor in memory.exported().state_dict().items():
        assert torch.equal(disk[name], tensor)
    assert list((tmp_path / "hidden").iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [
        {"tuning.blocks.enabled": False},
        {"tuning.blocks.epochs": 1},
        {"tuning.blocks.batch_size": 2},
        {"tuning.blocks.integer_rate": 0.004},
        {"tuning.blocks.scale_rate": 0.001},
        {"tuning.blocks.bias_rate": 0.001},
        {"tuning.model.enabled": False},
        {"tuning.model.epochs": 1},
        {"tuning.model.batch_size": 2},
        LEARNED,
        {"tuning.model.scale_rate": 0.001},
        {"tuning.model.bias_rate": 0.003},
        {"tuning.held_back": 0.5},
    ],
    ids=lambda change: list(change)[-1],
)
def test_every_setting_acts(change: dict[str, Any], walked: Walked, tmp_path: Path) -> None:
    """Before the tuning nothing is learned, which would take longer."""
    base, found = walked("bloom", BOTH | ROUNDED), walk("bloom", tmp_path, BOTH | ROUNDED | change)
    files = [q.journal["blocks"][str(i)]["files"] for q in (found, base) for i in range(walks.BLOCKS)]
    assert files[: walks.BLOCKS] != files[walks.BLOCKS :]
    name = next(iter(change))
    if ".model." in name:
        for index in range(walks.BLOCKS):
            before = base.journal["blocks"][str(index)]["tuning"]
            assert found.journal["blocks"][str(index)]["tuning"] == before


class Poison(Callback):
    """Makes what is trained NaN at the first step."""

    def on_train_batch_start(self, _trainer: Any, pl_module: Any, *_: Any) -> None:
        for parameter in pl_module.parameters():
            if parameter.requires_grad:
                parameter.data.fill_(math.nan)


def test_a_tuning_that_is_not_finite_leaves_the_block_as_it_was(tmp_path: Path) -> None:
    searched = ROUNDED | {"grid.search": True}  # rtn itself keeps the columns of dead inputs
    plain = walk("opt", tmp_path / "plain", searched)
    found = walk(
        "opt",
        tmp_path / "poisoned",
        BOTH | searched,
        tuning_options=lambda _run, _training: {"callbacks": [Poison()]},
    )
    for index in range(walks.BLOCKS):
        record = found.journal["blocks"][str(index)]["tuning"]
        assert (record["finite"], record["epoch"], record["changed"]) == (False, 0, 0)
        expected = plain.file(index)
        assert all(torch.equal(t, expected[name]) for name, t in found.file(index).items())
    assert not found.journal["tuned"]["finite"]
    state = found.exported().state_dict()
    for name, tensor in plain.exported().state_dict().items():
        assert torch.equal(state[name], tensor)
    assert found.said.count("it ended where the loss was not a finite number") == walks.BLOCKS + 1
