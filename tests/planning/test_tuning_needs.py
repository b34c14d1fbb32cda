"""What a plan says of the tuning, and what is refused before a walk."""

import re
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from aespa_pl.commands.limits import tuning_shortages
from aespa_pl.errors import UserError
from aespa_pl.measure import human
from aespa_pl.models import family_of
from aespa_pl.models.kept import layouts_of
from aespa_pl.planning import budget
from aespa_pl.planning.budget import RESERVE, resolved_place
from aespa_pl.planning.estimate import block_flops, needs_of
from aespa_pl.planning.needs import hidden_bytes
from aespa_pl.planning.shape import Devices, Setup, Shape, Work
from aespa_pl.planning.tuning import block_bytes, model_bytes, recomputes, streamed_bytes, streaming_bytes
from aespa_pl.resolve import resolved
from aespa_pl.settings import (
    BlockTuningSettings,
    DataSettings,
    ModelTuningSettings,
    QuantizationSettings,
    TuningSettings,
)
from tests.models.examples import EXAMPLES, LENGTH, make_ids, make_model
from tests.planning.shapes import PAPER, device_bytes, shape
from tests.walks import changed


def tuned(*, blocks: bool, model: bool) -> QuantizationSettings:
    settings = TuningSettings(BlockTuningSettings(blocks), ModelTuningSettings(model, epochs=1))
    return resolved(replace(PAPER, tuning=settings))


NONE = tuned(blocks=False, model=False)
BLOCKS = tuned(blocks=True, model=False)
MODEL = tuned(blocks=False, model=True)
WORK = Work(segments=32, length=LENGTH, batch_size=2, dtype_bytes=4)
CPU = torch.device("cpu")


def test_arithmetic_of_an_epoch_is_that_of_forward_and_backward_passes() -> None:
    """Of the model: blocks and the head, which is not trained; the original's head is one more product."""
    torch.manual_seed(0)
    model, ids = make_model("llama-grouped", torch.float32), make_ids(4)
    model.requires_grad_()
    model.lm_head.requires_grad_(False)
    with FlopCounterMode(display=False) as counter:
        model(ids).logits.sum().backward()
    settings = replace(MODEL, tuning=replace(MODEL.tuning, held_back=1e-9))
    work, s = replace(WORK, segments=4), shape()
    counted = s.blocks * block_flops(s, work, settings)["tuning of the model"]
    head = 2 * ids.numel() * s.hidden * s.vocabulary  # the original's
    # of causal attention, the counter may know other halves than we do
    assert counted - head == pytest.approx(counter.get_total_flops(), rel=0.15)


def test_nothing_is_counted_without_tuning_and_no_second_stream() -> None:
    needs, flops = device_bytes(shape(), WORK, NONE), block_flops(shape(), WORK, NONE)
    for phase in ("tuning of blocks", "tuning of the model"):
        assert needs[phase] == flops[phase] == 0
    assert 2 * hidden_bytes(shape(), WORK, NONE) == hidden_bytes(shape(), WORK, BLOCKS)


@pytest.mark.parametrize("method", ["brecq", "omniquant", "affinequant"])
def test_every_parametrization_has_its_needs(method: str) -> None:
    settings = resolved(QuantizationSettings(method=method))
    assert device_bytes(shape(), WORK, settings)["tuning of blocks"] > 0
    once = resolved(changed({"tuning.blocks.epochs": 1}, settings))
    counted, of_one = (block_flops(shape(), WORK, s)["tuning of blocks"] for s in (settings, once))
    assert counted > 0.8 * int(settings.tuning.blocks.epochs or 0) * of_one
    streams = 3 if method == "brecq" else 2
    assert hidden_bytes(shape(), WORK, settings) == streams * hidden_bytes(shape(), WORK, NONE)


def test_a_block_needs_the_same_in_a_deeper_model_and_the_model_more() -> None:
    deep = replace(shape(), blocks=10 * shape().blocks, of_blocks=10 * shape().of_blocks)
    assert device_bytes(deep, WORK, BLOCKS) == device_bytes(shape(), WORK, BLOCKS)
    for recompute in (False, True):
        before, after = (model_bytes(s, WORK, MODEL, recompute=recompute) for s in (shape(), deep))
        assert after - before >= 9 * shape().blocks * 4 * shape().weights
    kept, again = (model_bytes(deep, WORK, MODEL, recompute=r) for r in (False, True))
    assert again < kept


def test_a_hybrid_needs_what_the_kind_of_block_with_the_most_needs() -> None:
    hybrid = shape("qwen3-next")
    assert hybrid.other is not None
    kinds = [replace(hybrid, other=None), hybrid.other]
    assert block_bytes(hybrid, WORK, BLOCKS) == max(block_bytes(kind, WORK, BLOCKS) for kind in kinds)
    each = [model_bytes(kind, WORK, MODEL, recompute=True) for kind in kinds]
    assert model_bytes(hybrid, WORK, MODEL, recompute=True) == max(each) > min(each)


def test_a_hybrid_whose_blocks_of_one_kind_are_kept_has_needs() -> None:
    config = EXAMPLES["qwen3-next"]()
    kept = replace(BLOCKS, bits_of={"1": 16})  # its only block with linear attention
    found = Shape.of(config, layouts_of(family_of(config), config, kept))
    assert found.other is None
    assert device_bytes(found, WORK, kept)["statistics"] > 0


def test_types_of_llama_cpp_have_numbers_for_each_group_of_columns_to_learn() -> None:
    """Q4_K: d and d_min for 256 columns, a and c for 32; Q8_0: d for 32. Each has its logarithm and so on."""
    s = shape()

    def needed(kind: str, tuned: QuantizationSettings) -> int:
        keys = (f"{i}.{name}" for i, of_block in enumerate(s.of_blocks) for name in of_block)
        return model_bytes(s, WORK, replace(tuned, types=dict.fromkeys(keys, kind)), recompute=True)

    weights = sum(m.size for of_block in s.of_blocks for m in of_block.values())
    typed = replace(MODEL, format="Q4_K")
    found = needed("Q4_K", typed) - needed("Q8_0", typed)
    assert found == pytest.approx(24 * weights * (2 / 256 + 2 / 32 - 1 / 32), abs=s.blocks)


def test_plan_counts_what_fit_chooses_by_the_memory_that_is_free() -> None:
    """What blocks keep for the backward pass counts where it fits; otherwise they run once more."""
    kept, again = (model_bytes(shape(), WORK, MODEL, recompute=r) for r in (False, True))
    assert not recomputes(shape(), WORK, MODEL, kept)
    assert recomputes(shape(), WORK, MODEL, kept - 1)
    streams = hidden_bytes(shape(), WORK, MODEL)
    for free, needed in ((kept, kept), (kept - 1, again)):
        data = DataSettings(hidden_states="memory", memory_gb=(free + streams) / 1e9)
        needs = needs_of(Setup(shape(), WORK, data, MODEL, CPU), stored_bytes=2, rate=1e9)
        assert needs.device["tuning of the model"] == needed


def test_the_model_is_on_disk_where_it_does_not_fit_in_memory() -> None:
    whole = model_bytes(shape(), WORK, MODEL, recompute=True)
    on_disk = changed({"tuning.model.blocks": "disk"}, MODEL)
    deep = replace(shape(), blocks=10 * shape().blocks, of_blocks=10 * shape().of_blocks)
    more = model_bytes(deep, WORK, on_disk, recompute=True) - model_bytes(
        shape(), WORK, on_disk, recompute=True
    )
    # of a block more: scales with gradient, moments and best epoch, and the input of each token
    assert more < 0.1 * (model_bytes(deep, WORK, MODEL, recompute=True) - whole)
    streams = hidden_bytes(shape(), WORK, MODEL)
    for free, place in ((whole, "memory"), (whole - 1, "disk")):
        data = DataSettings(hidden_states="memory", memory_gb=(free + streams) / 1e9)
        found = resolved_place(Setup(shape(), WORK, data, MODEL, CPU))
        assert found.tuning.model.blocks == place
        assert resolved_place(Setup(shape(), WORK, DataSettings(memory_gb=1e-6), found, CPU)) == found


@pytest.mark.parametrize(("processes", "place"), [(1, "memory"), (2, "disk")])
def test_processes_on_a_cpu_share_the_memory_for_the_model(
    monkeypatch: pytest.MonkeyPatch, processes: int, place: str
) -> None:
    data = DataSettings(hidden_states="memory")
    needed = model_bytes(shape(), WORK, MODEL, recompute=True) + hidden_bytes(shape(), WORK, MODEL)
    monkeypatch.setattr("aespa_pl.planning.budget.free_bytes", lambda _: 1.5 * needed / RESERVE)
    found = resolved_place(Setup(shape(), WORK, data, MODEL, CPU, Devices(processes)))
    assert found.tuning.model.blocks == place


def test_segments_of_a_mini_batch_run_one_by_one_where_blocks_are_on_disk() -> None:
    """A segment more takes its hidden states, and the inputs of the blocks that wait in host memory.

    There are also the integers of the next block, in a byte each, and the offsets of two in float16. Where
    segments add up their gradients, these are there beside the weights, in place of the next offsets.
    """
    one, two = (changed({"tuning.model.blocks": "disk", "tuning.model.batch_size": n}, MODEL) for n in (1, 2))
    large = replace(shape(), vocabulary=10_000)
    hidden = 4 * LENGTH * large.hidden
    more = model_bytes(large, WORK, two, recompute=True) - model_bytes(large, WORK, one, recompute=True)
    assert hidden + 2 * large.weights <= more < LENGTH * large.vocabulary  # no logits
    inputs = 2 * large.blocks * hidden
    assert streaming_bytes(large, WORK, two) == inputs + (1 + 2 * 2) * large.weights
    alone = replace(large, blocks=1, of_blocks=large.of_blocks[:1])
    assert streaming_bytes(alone, WORK, two) == 2 * hidden + 2 * large.weights  # none to read ahead
    scales = changed({"tuning.model.integer_rate": 0.0}, two)
    assert streaming_bytes(large, WORK, scales) == inputs + large.weights
    assert streaming_bytes(large, WORK, MODEL) == 0


@pytest.mark.parametrize(("settings", "key"), [(BLOCKS, "blocks"), (MODEL, "model")])
def test_what_does_not_fit_is_named_with_what_to_do(settings: QuantizationSettings, key: str) -> None:
    assert not tuning_shortages(Setup(shape(), WORK, DataSettings(), settings, CPU))
    tight = DataSettings(memory_gb=1e-6)
    assert not tuning_shortages(Setup(shape(), WORK, tight, NONE, CPU))
    setup = Setup(shape(), WORK, tight, settings, CPU)
    assert not tuning_shortages(setup, [key])  # a run that has done it goes on
    of_new, of_continued = tuning_shortages(setup)[0], tuning_shortages(setup, [])[0]
    assert f"quantization.tuning.{key}.enabled to false" in of_new
    assert f"lower quantization.tuning.{key}.batch_size" in of_new
    for refused in ("batch_size", "segment_length", "enabled"):  # a run can't be continued with others
        assert refused not in of_continued
    for words in (of_new, of_continued):
        assert "data.hidden_states" in words
        assert ("tuning.model.blocks to disk" in words) == (key == "model")


def test_hidden_states_that_take_the_memory_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = hidden_bytes(shape(), WORK, MODEL)
    monkeypatch.setattr(budget, "free_bytes", lambda _: 0.5 * waiting / RESERVE)
    (words,) = tuning_shortages(Setup(shape(), WORK, DataSettings(), MODEL, CPU))
    assert f"of which 0 B may be taken beside {human(waiting, 'B')} of hidden states" in words


def test_processes_of_a_cpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = model_bytes(shape(), WORK, MODEL, recompute=True)
    free = 1.5 * needed / RESERVE + 2 * hidden_bytes(shape(), WORK, MODEL)
    monkeypatch.setattr(budget, "free_bytes", lambda _: free)
    assert not tuning_shortages(Setup(shape(), WORK, DataSettings(), MODEL, CPU))
    (words,) = tuning_shortages(Setup(shape(), WORK, DataSettings(), MODEL, CPU, Devices(2)))
    assert re.search(r"tuning.model needs .* by each of 2 processes", words)
    assert not tuning_shortages(Setup(shape(), WORK, DataSettings(), MODEL, CPU, Devices(2, hosts=2)))


@pytest.mark.parametrize("settings", [BLOCKS, MODEL])
def test_too_few_segments_are_refused(settings: QuantizationSettings) -> None:
    with pytest.raises(UserError, match=r"\(1, of which 1 held back\)"):
        tuning_shortages(Setup(shape(), replace(WORK, segments=1), DataSettings(), settings, CPU))


def test_blocks_on_disk_are_read_and_written_in_each_step() -> None:
    s, streamed = shape(), changed({"tuning.model.blocks": "disk"}, MODEL)
    assert streamed_bytes(s, WORK, MODEL) == 0
    weights = sum(m.size for block in s.of_blocks for m in block.values())
    held = 2  # segments of 32, in the epoch and before it
    # of integers a byte, of offsets two: read forward and backward, and offsets written
    assert streamed_bytes(s, WORK, streamed) == weights * (30 * (2 * 3 + 2) + 2 * held * 3)
    scales = changed({"tuning.model.integer_rate": 0.0}, streamed)
    assert streamed_bytes(s, WORK, scales) == weights * (30 * 2 + 2 * held)
