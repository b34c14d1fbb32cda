"""Memory and disk are counted byte by byte, from the shape of a model."""

from dataclasses import replace
from typing import Literal

import pytest

from aespa_pl.calibration.end_loss import POSITIONS
from aespa_pl.calibration.moments import MOST_ROWS, couples
from aespa_pl.models import family_of
from aespa_pl.models.family import Role
from aespa_pl.models.kept import layouts_of
from aespa_pl.planning.estimate import block_flops
from aespa_pl.planning.needs import batch_bytes, disk_bytes, hessian_bytes, host_bytes, shifts
from aespa_pl.planning.shape import Shape, Work
from aespa_pl.resolve import resolved
from aespa_pl.settings import ObjectiveSettings, QuantizationSettings
from tests.models.examples import EXAMPLES, make_ours
from tests.planning.shapes import ALL_TOKENS, PAPER, WORK, device_bytes, setup, shape


def test_statistics_are_counted_one_by_one() -> None:
    s = shape()  # 24 wide, 4 query and 2 key heads of 6, feed-forward of 20 or 32
    config = EXAMPLES["llama-grouped"]()
    d, wide = s.hidden, s.inputs["mlp_hidden"]
    layout = s.layout
    plain = sum(c**2 for c in (d, layout.heads * layout.head_dim, d, wide))
    G = (layout.heads + layout.key_value_heads) * layout.head_dim**2
    H_V = layout.key_value_heads * d**2
    assert hessian_bytes(s, PAPER) == 4 * (plain + G + H_V)
    layer = replace(PAPER, objective=ObjectiveSettings("layer", "layer"))
    assert hessian_bytes(s, layer) == 4 * plain
    kept = Shape.of(config, layouts_of(family_of(config), config, replace(PAPER, bits_of={"v_proj": 16})))
    assert hessian_bytes(kept, PAPER) == 4 * (plain + G)
    assert shifts(s, PAPER) == 0
    inputs, outputs = 2 * d**2, d * (layout.heads * layout.head_dim + wide)
    values = layout.key_value_heads * layout.head_dim * d
    assert shifts(s, resolved(QuantizationSettings(method="aespa"))) == (inputs + outputs + values)


def test_memory_of_a_batch_is_that_of_one_heads_chunk() -> None:
    """Not of the probabilities of all heads, but where the model forms them itself."""
    s, layout = shape("llama"), shape("llama").layout
    long = Work(segments=1, length=1 << 15, batch_size=1, dtype_bytes=2)
    all_heads = 4 * layout.heads * long.length**2
    assert batch_bytes(s, long, PAPER) < 0.5 * all_heads
    assert batch_bytes(shape("bloom"), long, PAPER) > 3 * all_heads
    # an eighth of the rows of one head, scores and probabilities, and all else grows with L
    twice = replace(long, length=2 * long.length)
    square = batch_bytes(s, twice, PAPER) - 2 * batch_bytes(s, long, PAPER)
    assert square == 4 * 2 * (twice.length**2 // 8 - 2 * (long.length**2 // 8))
    d = s.hidden
    # shifts of the attention's output, the original's inputs and residual streams, what is added to both
    aespa = resolved(QuantizationSettings(method="aespa", objective=ALL_TOKENS))
    both = batch_bytes(s, long, aespa) - batch_bytes(s, long, PAPER)
    inputs = sum(s.inputs.values()) + 7 * d
    assert both == 4 * long.length * 3 * d + 2 * long.length * inputs


def test_fewer_rows_of_the_values_statistic_take_less_time_and_memory() -> None:
    s = shape("llama")
    work = Work(segments=128, length=2048, batch_size=4, dtype_bytes=2)
    some = replace(PAPER, objective=replace(PAPER.objective, value_tokens=16))
    assert batch_bytes(s, work, some) < batch_bytes(s, work, PAPER)
    assert block_flops(s, work, some)["statistics"] < 0.8 * block_flops(s, work, PAPER)["statistics"]
    short = replace(work, segments=1, length=32)
    assert block_flops(s, short, some) == block_flops(s, short, PAPER)


def test_less_is_learned_with_a_faster_method() -> None:
    s, found = shape(), {}
    for method in ("aespa", "aespa-hybrid", "aespa-fast"):
        settings = resolved(QuantizationSettings(method=method, input_correction=0))
        found[method] = (
            device_bytes(s, WORK, settings)["rounding"],
            block_flops(s, WORK, settings)["rounding"],
            disk_bytes(setup(s, WORK, settings), 2),
        )
    for one, two in (("aespa", "aespa-hybrid"), ("aespa-hybrid", "aespa-fast")):
        assert all(a > b for a, b in zip(found[one], found[two], strict=True))
    assert found["aespa-fast"][1] == 0


@pytest.mark.parametrize(
    ("products", "accelerator", "share"), [("bfloat16", True, 0.5), ("tf32", True, 0), ("bfloat16", False, 1)]
)
def test_products_of_less_precision_need_the_statistics_in_it(
    products: Literal["bfloat16", "tf32"], accelerator: bool, share: float
) -> None:
    """A CPU holds a rounded copy in float32, an accelerator one in bfloat16, and reads TF32 from float32."""
    exact = device_bytes(shape(), WORK, PAPER, accelerator=accelerator)
    lower = device_bytes(shape(), WORK, replace(PAPER, products=products), accelerator=accelerator)
    assert lower["rounding"] - exact["rounding"] == share * hessian_bytes(shape(), PAPER)
    assert {**lower, "rounding": 0} == {**exact, "rounding": 0}


def test_hidden_states_are_in_memory_or_on_disk() -> None:
    s, settings = shape(), resolved(QuantizationSettings(method="aespa"))
    stream = 10 * 32 * s.hidden * 2
    host = [host_bytes(setup(s, WORK, settings, accelerator=True, on_disk=d)) for d in (False, True)]
    # the original's and the quantized model's
    assert host[0] - host[1] == 2 * stream
    disk = [disk_bytes(setup(s, WORK, settings, on_disk=d), 2) for d in (False, True)]
    assert disk[1] - disk[0] == 2 * stream
    largest = max(device_bytes(s, WORK, settings).values())
    assert host_bytes(setup(s, WORK, settings, on_disk=True)) == host[1] + largest


@pytest.mark.parametrize("name", ["lfm2", "qwen3.5", "llama"])
def test_the_disk_holds_every_parameter_and_every_integer(name: str) -> None:
    """Blocks may differ in size."""
    model, settings = make_ours(name), resolved(QuantizationSettings(method="rtn"))
    layouts = family_of(model.config).layouts(model.config)
    blocks = model.get_submodule(family_of(model.config).blocks_path)
    modules = ((block, {p.module for p in of.projections}) for block, of in zip(blocks, layouts, strict=True))
    integers = sum(block.get_submodule(path).weight.numel() for block, paths in modules for path in paths)
    parameters = sum(p.numel() for p in model.parameters())
    found = [disk_bytes(setup(shape(name), WORK, settings), stored) for stored in (1, 2)]
    assert found == [parameters + integers, 2 * parameters + integers]


def test_accelerators_groups_block_types_and_polish_take_memory() -> None:
    """How much, benchmarks/memory.py measures; the shape is one of LLaMA-7B."""
    layout = replace(shape().layout, heads=32, key_value_heads=32)
    matrices = tuple(replace(m, columns=4096, rows=4096) for m in shape().matrices)
    s = replace(shape(), layout=layout, matrices=matrices, hidden=4096)
    of_cpu, of_gpu = (device_bytes(s, WORK, PAPER, accelerator=yes) for yes in (False, True))
    assert all(of_gpu[phase] > of_cpu[phase] for phase in ("rounding", "grid", "OPTQ"))
    assert device_bytes(s, WORK, replace(PAPER, group_size=4))["grid"] > of_cpu["grid"]
    off = replace(PAPER, polish=replace(PAPER.polish, enabled=False))
    assert of_cpu["polish"] > device_bytes(s, WORK, off)["polish"]
    typed, uniform = (replace(PAPER, format=name) for name in ("Q4_K", "uniform"))
    assert device_bytes(s, WORK, typed)["OPTQ"] > device_bytes(s, WORK, uniform)["OPTQ"]


def test_steps_that_are_not_done_need_nothing() -> None:
    off = replace(
        PAPER, polish=replace(PAPER.polish, enabled=False), grid=replace(PAPER.grid, search=False),
        optq=replace(PAPER.optq, enabled=False), rounding=replace(PAPER.rounding, learn="none"),
    )  # fmt: skip
    on = replace(PAPER, polish=replace(PAPER.polish, enabled=True))
    for phase in ("grid", "OPTQ", "rounding", "polish"):
        assert device_bytes(shape(), WORK, on)[phase] > 0
        assert device_bytes(shape(), WORK, off)[phase] == 0


def test_no_expert_has_a_matrix_of_the_end_loss() -> None:
    """Nor a shared one, which sees all tokens."""
    s = shape("qwen2-moe")
    found = s.coupled(replace(PAPER, objective=replace(PAPER.objective, end_loss=True)))
    projections = [p for g in s.layout.groups for each in g.inputs.values() for p in each]
    assert any(p.expert is not None and s.layout.mixture.share(p.expert) == 1 for p in projections)
    assert len(found) == sum(couples(p) for p in projections)


def test_the_end_loss_takes_a_matrix_for_the_rows_of_each_head() -> None:
    s = shape()
    knowing = replace(PAPER, objective=replace(PAPER.objective, end_loss=True))
    heads, rows = s.layout.heads_of, {m.role: m.rows for m in s.matrices}
    numbers = sum(m.rows**2 for m in s.matrices if m.role is Role.OTHER)
    of_scores = sum(rows[role] ** 2 // heads(role) for role in (Role.QUERY, Role.KEY))
    assert s.coupling_numbers(PAPER) == 0
    assert s.coupling_numbers(knowing) == numbers + of_scores
    # Q and K have one of the same size without it
    assert hessian_bytes(s, knowing) - hessian_bytes(s, PAPER) == 4 * numbers
    data = (disk_bytes(setup(s, WORK, q), 2) for q in (knowing, PAPER))
    assert next(data) - next(data) == 2 * s.blocks * (numbers + of_scores)
    more, plain = (block_flops(s, WORK, q)["rounding"] for q in (knowing, PAPER))
    products = sum(2 * m.size * rows for m, rows in s.coupled(knowing))
    assert more - plain == pytest.approx(PAPER.rounding.iterations * products)
    wordy = replace(s, vocabulary=10**6)
    logits = min(WORK.length, POSITIONS) * wordy.vocabulary * (WORK.dtype_bytes + 16)
    assert device_bytes(wordy, WORK, knowing)["statistics"] >= logits
    assert device_bytes(wordy, WORK, PAPER)["statistics"] < logits
    wide = replace(
        s, matrices=tuple(replace(m, rows=MOST_ROWS + 1) for m in s.matrices if m.role is Role.OTHER)
    )
    assert wide.coupling_numbers(knowing) == 0
