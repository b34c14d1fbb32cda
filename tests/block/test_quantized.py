"""What enters the rounding is what the specification names; what leaves it is exported exactly."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from aespa_pl.algorithm.quantizer import Grid, dequantize
from aespa_pl.block.correct import correct
from aespa_pl.block.grids import fit_grids
from aespa_pl.block.quantized import QuantizedBlock, QuantizedProjection, nearest_weight
from aespa_pl.block.update import update
from aespa_pl.calibration.hessian import Hessian
from aespa_pl.calibration.statistics import BlockStatistics, Shifts
from aespa_pl.distributed.processes import ALONE, World
from aespa_pl.errors import NumericalError
from aespa_pl.models import family_of
from aespa_pl.models.family import BlockLayout, FoldIntoRows, Role
from aespa_pl.models.weights import fold, projection_weight, set_projection_weight
from aespa_pl.resolve import resolved
from aespa_pl.settings import GridSettings, QuantizationSettings
from tests import reference
from tests.models.examples import EXAMPLES, make_ids, make_model

every_example = pytest.mark.parametrize("name", EXAMPLES)

QUICK = GridSettings(max_rounds=2)
"""Enough for a zeta that is not 1."""
FEW = resolved(QuantizationSettings(grid=QUICK))
ROLES = {"q_proj": "query", "k_proj": "key", "v_proj": "value"}
"""Names of all families but BLOOM, whose projections are called as their roles are."""


def example(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, BlockLayout]:
    """Return the first block of an example and its layout."""
    model = make_model(name, dtype)
    family = family_of(model.config)
    return model.get_submodule(family.blocks_path)[0], family.layout(model.config)


def linear(block: nn.Module, module: str) -> nn.Linear:
    found = block.get_submodule(module)
    assert isinstance(found, nn.Linear)
    return found


def second_moment(size: int, *heads: int) -> Tensor:
    X = torch.randn(*heads, size, 3 * size) * (0.2 + torch.rand(size, 1))
    return X @ X.transpose(-1, -2) * 2 / (3 * size)


def make_statistics(
    block: nn.Module,
    layout: BlockLayout,
    *,
    value: bool = True,
    query_key: bool = True,
    change: Callable[[dict[str, Tensor]], object] = lambda _: None,
) -> BlockStatistics:
    """Return random statistics, each different from all others.

    Args:
        block: The block that they are for.
        layout: Its layout.
        value: With H_V.
        query_key: With G_Q and G_K.
        change: Changes the matrices by name: those of the groups, and H_V under "attended".
    """
    size = {
        group.name: linear(block, group.projections[0].module).in_features
        for group in layout.groups
    }
    d, d_h = size["attention_input"], layout.head_dim
    matrices = {name: second_moment(columns) for name, columns in size.items()}
    matrices["attended"] = second_moment(d, layout.key_value_heads)
    change(matrices)
    return BlockStatistics(
        {name: Hessian(matrices[name][None]) for name in size},
        Hessian(matrices["attended"]) if value else None,
        second_moment(d_h, layout.heads) if query_key else None,
        second_moment(d_h, layout.key_value_heads) if query_key else None,
    )


def begin(
    block: nn.Module,
    layout: BlockLayout,
    statistics: BlockStatistics,
    settings: QuantizationSettings = FEW,
    damping: float = 0.01,
) -> QuantizedBlock:
    quantized = QuantizedBlock.nearest(0, block, layout, statistics, settings)
    quantized.damp(damping)
    quantized.clear_dead_columns()
    return quantized


def make_block(name: str, settings: QuantizationSettings = FEW) -> QuantizedBlock:
    block, layout = example(name)
    return begin(block, layout, make_statistics(block, layout), settings)


def gridded(
    name: str, settings: QuantizationSettings = FEW, world: World = ALONE
) -> QuantizedBlock:
    """Return a block after step 2; the same name gives the same weights and statistics."""
    torch.manual_seed(1)
    block = make_block(name, settings)
    fit_grids(block, settings, world)
    return block


def updated(block: QuantizedBlock, settings: QuantizationSettings = FEW) -> QuantizedBlock:
    """Run steps 2 and 3."""
    fit_grids(block, settings, ALONE)
    update(block, ALONE)
    return block


def damped(H: Tensor, damping: float) -> Tensor:
    """Add ``damping`` times the mean diagonal to the diagonal, entry by entry."""
    H = H.double().clone()
    mean = sum(float(H[j, j]) for j in range(H.shape[0])) / H.shape[0]
    for j in range(H.shape[0]):
        H[j, j] += damping * mean
    return H


def role(name: str) -> str:
    return ROLES.get(name, name if name in ROLES.values() else "other")


def rows_by_hand(block: nn.Module, layout: BlockLayout, name: str, module: str) -> Tensor:
    """Return a projection's weight ``[heads, rows, d_in]``, row by row."""
    weight = linear(block, module).weight
    size = layout.head_dim
    heads = {"query": layout.heads, "key": layout.key_value_heads, "value": layout.key_value_heads}
    if role(name) not in heads:
        return weight[None].float()
    fused = module.endswith("query_key_value")
    parts, part = (3, ["query", "key", "value"].index(name)) if fused else (1, 0)
    rows = [
        weight[(head * parts + part) * size + i] for head in range(heads[role(name)])
        for i in range(size)
    ]  # fmt: skip
    return torch.stack(rows).view(heads[role(name)], size, -1).float()


@pytest.mark.parametrize("value", [True, False])
@every_example
def test_each_projection_meets_the_hessian_of_its_role(name: str, *, value: bool) -> None:
    block, layout = example(name)
    statistics = make_statistics(block, layout, value=value)
    raw = copy.deepcopy(statistics)
    problem = begin(block, layout, statistics, damping=0.3)
    problem.damp(0.03)  # from what they were before the first
    for group in layout.groups:
        for p in group.projections:
            matrices = [raw.inputs[group.name][:][0]]
            if role(p.name) == "value" and value:
                assert raw.attended is not None
                matrices = list(raw.attended[:])
                assert len(matrices) == layout.key_value_heads
            expected = torch.stack([damped(H, 0.03) for H in matrices])
            torch.testing.assert_close(problem.projections[p.name].hessian[:].double(), expected)


@every_example
def test_weights_are_split_into_the_heads_of_their_role(name: str) -> None:
    block, layout = example(name)
    problem = begin(block, layout, make_statistics(block, layout))
    assert len(problem.projections) == len(layout.projections)
    for p in layout.projections:
        expected = rows_by_hand(block, layout, p.name, p.module)
        assert torch.equal(problem.projections[p.name].weight, expected)


def test_weights_of_a_half_precision_block_are_worked_on_in_single_precision() -> None:
    block, layout = example("llama-grouped", torch.bfloat16)
    problem = begin(block, layout, make_statistics(block, layout))
    for p in problem.projections.values():
        assert p.weight.dtype == p.hessian[:].dtype == torch.float32
    assert block.get_submodule("mlp.up_proj").weight.dtype == torch.bfloat16


@pytest.mark.parametrize("query_key", [True, False])
@pytest.mark.parametrize("name", ["opt", "bloom", "llama-grouped"])
def test_queries_are_weighed_with_keys_and_keys_with_queries(name: str, *, query_key: bool) -> None:
    block, layout = example(name)
    statistics = make_statistics(block, layout, query_key=query_key)
    for p in begin(block, layout, statistics).projections.values():
        expected = {"query": statistics.keys, "key": statistics.queries}.get(
            role(p.projection.name)
        )
        if expected is None:
            assert p.other_side is None
        else:
            assert torch.equal(p.other_side, expected)
            assert p.other_side.shape[0] == p.weight.shape[0]


@every_example
def test_targets_are_the_formula_with_the_hessian_of_the_role(name: str) -> None:
    block, layout = example(name)
    statistics = make_statistics(block, layout)
    d = len(statistics.inputs["attention_input"][:][0])
    inputs = {key: torch.randn(d, d) for key in ("attention_input", "mlp_input")}
    outputs = {
        key: torch.randn(d, len(statistics.inputs[key][:][0]))
        for key in ("attention_output", "mlp_hidden")
    }
    assert statistics.attended is not None
    raw = copy.deepcopy(statistics)
    attended = torch.randn(layout.key_value_heads, layout.head_dim, d)
    quantized = begin(block, layout, statistics, damping=0.02)
    correct(quantized, Shifts(inputs, outputs, attended), 0.3)
    for group in layout.groups:
        for p in group.projections:
            W = rows_by_hand(block, layout, p.name, p.module).double()
            for head in range(W.shape[0]):
                H = raw.inputs[group.name][:][0]
                if role(p.name) == "value":
                    H, change = raw.attended[:][head], attended[head].double()
                elif group.name in outputs:
                    change = outputs[group.name].double()
                else:
                    change = W[head] @ inputs[group.name].double()
                expected = W[head] + 0.3 * change @ torch.linalg.inv(damped(H, 0.02))
                torch.testing.assert_close(
                    quantized.projections[p.name].weight[head].double(),
                    expected,
                    rtol=1e-3,
                    atol=1e-3,
                )


def kill(H: Tensor, column: int) -> None:
    H[column] = 0
    H[:, column] = 0


@pytest.mark.parametrize("value", [True, False])
def test_weights_of_dead_inputs_are_zero(*, value: bool) -> None:
    block, layout = example("llama-grouped")

    def change(matrices: dict[str, Tensor]) -> None:
        kill(matrices["attention_input"], 5)
        kill(matrices["mlp_hidden"], 2)

    statistics = make_statistics(block, layout, value=value, change=change)
    dead = {"q_proj": 5, "k_proj": 5, "down_proj": 2} | ({} if value else {"v_proj": 5})
    problem = begin(block, layout, statistics)
    for p in layout.projections:
        expected = rows_by_hand(block, layout, p.name, p.module).clone()
        if p.name in dead:
            expected[:, :, dead[p.name]] = 0
        assert torch.equal(problem.projections[p.name].weight, expected)
    assert bool(linear(block, "self_attn.q_proj").weight[:, 5].all())  # the block keeps it


def test_value_inputs_are_dead_for_each_head_on_its_own() -> None:
    block, layout = example("llama-grouped")
    statistics = make_statistics(block, layout, change=lambda m: kill(m["attended"][1], 3))
    W = begin(block, layout, statistics).projections["v_proj"].weight
    original = rows_by_hand(block, layout, "v_proj", "self_attn.v_proj")
    assert torch.equal(W[0], original[0])
    assert not bool(W[1, :, 3].any())
    assert torch.equal(W[1, :, 4:], original[1, :, 4:])


def test_dead_diagonal_is_revived_before_damping() -> None:
    block, layout = example("llama-grouped")
    statistics = make_statistics(block, layout, change=lambda m: kill(m["mlp_input"], 7))
    expected = statistics.inputs["mlp_input"][:][0].double().clone()
    expected[7, 7] = 1 / 2048
    quantized = begin(block, layout, statistics, damping=0.05)
    for name in ("gate_proj", "up_proj"):
        found = quantized.projections[name].hessian[:][0].double()
        torch.testing.assert_close(found, damped(expected, 0.05))


def test_a_dead_input_is_exported_as_zero() -> None:
    block, layout = example("opt")
    statistics = make_statistics(block, layout, change=lambda m: kill(m["mlp_hidden"], 4))
    p = updated(begin(block, layout, statistics)).projections["fc2"]
    assert not bool(dequantize(p.integers, p.grid)[:, :, 4].any())
    assert bool(dequantize(p.integers, p.grid)[:, :, 5].any())


@every_example
def test_zeta_is_shared_in_a_group_and_one_where_it_cannot_be_folded(name: str) -> None:
    problem = gridded(name)
    grids = grids_of(problem)
    for group in problem.layout.groups:
        zetas = [grids[p.name].zeta for p in group.projections]
        assert all(torch.equal(zeta, zetas[0]) for zeta in zetas)
        assert bool((zetas[0] > 0).all())
        assert bool((zetas[0] == 1).all()) == (group.fold is None)
    folded = {group.name for group in problem.layout.groups if group.fold is not None}
    assert set(problem.zetas()) == folded


def test_no_zeta_without_zfold() -> None:
    problem = gridded("llama", replace(FEW, grid=GridSettings(zfold=False)))
    assert all(group.fold is not None for group in problem.layout.groups)
    for grid in grids_of(problem).values():
        assert bool((grid.zeta == 1).all())


def grids_of(block: QuantizedBlock) -> dict[str, Grid]:
    return {name: p.grid for name, p in block.projections.items()}


def total_loss(block: QuantizedBlock, names: list[str]) -> float:
    """Return the sum of ``dw H dw^T`` over all rows under nearest rounding, in float64."""
    total = 0.0
    for name in names:
        p = block.projections[name]
        W, H, grid = p.weight.double(), p.hessian[:].double(), p.grid
        H = H.expand(W.shape[0], -1, -1)
        for head in range(W.shape[0]):
            for row in range(W.shape[1]):
                step = grid.scale[head, row, 0].double() * grid.zeta.double()
                zero = grid.zero_point[head, row, 0].double()
                q = ((W[head, row] / step).round() + zero).clamp(0, 2**grid.bits - 1)
                error = step * (q - zero) - W[head, row]
                total += float(error @ H[head] @ error)
    return total


def test_more_rounds_of_zfold_lower_the_loss_of_each_group() -> None:
    losses: list[list[float]] = []
    for grid in (GridSettings(zfold=False), GridSettings(max_rounds=1), GridSettings()):
        problem = gridded("llama-grouped", resolved(replace(FEW, grid=grid)))
        losses.append(
            [
                total_loss(problem, [p.name for p in group.projections])
                for group in problem.layout.groups
                if group.fold is not None
            ]
        )
    for plain, one, many in zip(*losses, strict=True):
        assert many <= one * (1 + 1e-3)  # scales are rounded to float16
        assert one <= plain * (1 + 1e-3)
    assert sum(losses[2]) < sum(losses[1]) < sum(losses[0])


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_symmetric_grids_have_their_zero_in_the_middle(bits: int) -> None:
    settings = resolved(QuantizationSettings(bits=bits, symmetric=True, grid=QUICK))
    for grid in grids_of(gridded("opt", settings)).values():
        assert bool((grid.zero_point == 2 ** (bits - 1)).all())
    for grid in grids_of(gridded("opt", replace(settings, symmetric=False))).values():
        assert len(grid.zero_point.unique()) > 1


@pytest.mark.parametrize("group_size", [None, 4])
@pytest.mark.parametrize("bits", [2, 4])
def test_each_group_of_columns_has_a_scale(bits: int, group_size: int | None) -> None:
    settings = resolved(QuantizationSettings(bits=bits, group_size=group_size, grid=QUICK))
    for p in updated(make_block("llama-grouped", settings), settings).projections.values():
        heads, rows, columns = p.weight.shape
        shape = (heads, rows, 1 if group_size is None else columns // group_size)
        assert p.grid.scale.shape == p.grid.zero_point.shape == p.folded_grid.scale.shape == shape
        assert torch.equal(p.grid.zero_point, p.grid.zero_point.round())
        assert torch.equal(p.integers, p.integers.round())
        assert float(p.integers.min()) == 0
        assert float(p.integers.max()) == 2**bits - 1


def test_zero_points_have_no_more_bits_than_weights() -> None:
    """Of rows without a positive weight as well, whose zero is the largest integer."""
    block, layout = example("llama-grouped")
    linear(block, "mlp.up_proj").weight.abs_().neg_()
    problem = begin(block, layout, make_statistics(block, layout))
    fit_grids(problem, replace(FEW, bits=4), ALONE)
    grid = problem.projections["up_proj"].grid
    assert 0 <= float(grid.zero_point.min()) <= float(grid.zero_point.max()) <= 15


@pytest.mark.parametrize("factor", [1.0, 1e-7, 1e7])
@pytest.mark.parametrize("name", ["opt", "bloom", "llama"])
def test_exported_scales_are_float16_numbers(name: str, factor: float) -> None:
    """Of weights beyond what float16 can hold as well."""
    block, layout = example(name)
    for p in layout.projections:
        linear(block, p.module).weight.mul_(factor if p.fused[0] == 0 else 1)
    problem = begin(block, layout, make_statistics(block, layout))
    for found in updated(problem).projections.values():
        assert torch.equal(found.folded_grid.scale.half().float(), found.folded_grid.scale)
        assert bool(found.folded_grid.scale.isfinite().all())
        assert bool((found.folded_grid.scale > 0).all())


def next_zeta(
    layout: BlockLayout, prepared: Mapping[str, QuantizedProjection], name: str
) -> Tensor:
    """Return the factor ``[heads, rows, 1]`` that the next group folds into a projection's rows."""
    W = prepared[name].weight
    for group in layout.groups:
        if group.fold == FoldIntoRows(name):
            return prepared[group.projections[0].name].grid.zeta.double().view(*W.shape[:2], 1)
    return torch.ones(*W.shape[:2], 1, dtype=torch.float64)


@pytest.mark.parametrize("group_size", [None, 4])
@every_example
def test_export_is_the_folded_dequantized_weight(name: str, group_size: int | None) -> None:
    settings = replace(FEW, group_size=group_size)
    problem = updated(make_block(name, settings), settings)
    prepared = problem.projections
    for p in prepared.values():
        size = group_size or p.weight.shape[-1]
        scale, zero = (
            value.double().repeat_interleave(size, -1)
            for value in (p.grid.scale, p.grid.zero_point)
        )
        unfolded = scale * p.grid.zeta.double() * (p.integers.double() - zero)
        rows = next_zeta(problem.layout, prepared, p.projection.name)
        folded = rows * unfolded / p.grid.zeta.double()
        exported = p.folded_grid.scale.double().repeat_interleave(size, -1) * (p.integers - zero)
        torch.testing.assert_close(exported, folded, rtol=3e-7, atol=0)


@every_example
def test_exported_model_gives_the_logits_of_the_dequantized_one(name: str) -> None:
    """And the model whose real-valued weights are folded those of the original."""
    plain, exported, folded = (make_model(name) for _ in range(3))
    exported.load_state_dict(plain.state_dict())
    folded.load_state_dict(plain.state_dict())
    ids, original = make_ids(), plain.state_dict()["lm_head.weight"].clone()
    family = family_of(plain.config)
    layout = family.layout(plain.config)
    before = plain(ids, use_cache=False).logits
    path = family.blocks_path
    blocks = (model.get_submodule(path) for model in (plain, exported, folded))
    for ours, theirs, real in zip(*blocks, strict=True):
        problem = begin(ours, layout, make_statistics(ours, layout))
        settings = replace(FEW, bits=3, grid=GridSettings(max_rounds=1))
        prepared = updated(problem, settings).projections
        zetas = problem.zetas()
        fold(real, layout, zetas)
        fold(theirs, layout, zetas)
        for p in prepared.values():
            zero = p.grid.zero_point.double()
            scale = p.grid.scale.double() * p.grid.zeta.double()
            set_projection_weight(ours, layout, p.projection, scale * (p.integers - zero))
            weight = p.folded_grid.scale.double() * (p.integers - zero)
            set_projection_weight(theirs, layout, p.projection, weight)
    assert torch.equal(plain.state_dict()["lm_head.weight"], original)
    after = plain(ids, use_cache=False).logits
    assert float((after - before).abs().max()) > 0.1
    # Grids are float32, and so are the library's RMSNorm and softmax: 6e-8 a rounding.
    for model, expected in ((exported, after), (folded, before)):
        found = model(ids, use_cache=False).logits
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("searched", [False, True])
def test_before_the_update_the_integers_are_the_nearest(*, searched: bool) -> None:
    problem = gridded("llama-grouped") if searched else make_block("llama-grouped")
    for p in problem.projections.values():
        assert p.updated is None
        for head in range(p.weight.shape[0]):
            for row in range(p.weight.shape[1]):
                step = p.grid.scale[head, row, 0].double() * p.grid.zeta.double()
                zero = float(p.grid.zero_point[head, row, 0])
                expected = reference.nearest(p.weight[head, row].double() / step, 1.0, zero, 3)
                assert torch.equal(p.integers[head, row].double(), expected)


def test_optq_updates_each_head_with_its_own_hessian_on_the_exported_grid() -> None:
    problem = updated(make_block("llama"))
    prepared = problem.projections
    for name in ("q_proj", "v_proj", "up_proj"):
        p = prepared[name]
        heads = p.weight.shape[0]
        H = p.hessian[:].double().expand(heads, -1, -1)
        scale = p.folded_grid.scale.double() / next_zeta(problem.layout, prepared, name)
        for head in range(heads):
            row = head + 1
            expected, integers = reference.optq_row(
                p.weight[head, row].double(),
                H[head],
                scale[head, row] * p.grid.zeta.double(),
                p.grid.zero_point[head, row].double().expand(24),
                3,
            )
            torch.testing.assert_close(p.updated[head, row].double(), expected, rtol=0, atol=1e-4)
            assert torch.equal(p.integers[head, row].double(), integers)
        assert not torch.equal(p.updated, p.weight)


def test_loss_is_the_quadratic_form_of_the_error() -> None:
    """Entry by entry, of any integers, against the original weights."""
    prepared = updated(make_block("llama-grouped")).projections
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        p = prepared[name]
        q = torch.randint(0, 4, p.weight.shape).float()
        found = p.loss(q)
        heads, rows, d_in = p.weight.shape
        assert found.shape == ((heads, 1) if p.other_side is not None else (heads, rows))
        dW = (p.grid.scale * p.grid.zeta * (q - p.grid.zero_point) - p.weight).double()
        H = p.hessian[:].double().expand(heads, -1, -1)
        for head in range(heads):
            # dw_i H dw_k for all pairs of rows
            pairs = torch.zeros(rows, rows, dtype=torch.float64)
            for j in range(d_in):
                for l in range(d_in):
                    pairs += H[head, j, l] * torch.outer(dW[head, :, j], dW[head, :, l])
            if p.other_side is None:
                expected = pairs.diagonal()
            else:
                G = p.other_side[head].double()
                terms = [G[i, k] * pairs[k, i] for i in range(rows) for k in range(rows)]
                expected = torch.stack(terms).sum()[None]
            torch.testing.assert_close(found[head].double(), expected, rtol=1e-4, atol=1e-4)


def test_damping_that_a_factorization_needs_is_reported() -> None:
    block, layout = example("opt")
    singular = 1 + torch.eye(20) - 2.2 * torch.eye(20).fliplr()
    statistics = make_statistics(block, layout, change=lambda m: m["mlp_hidden"].copy_(singular))
    prepared = updated(begin(block, layout, statistics)).projections
    needed = {name for name, p in prepared.items() if p.measured["extra_damping"] > 0}
    assert needed == {"fc2"}


def test_a_hessian_that_cannot_be_factored_is_named() -> None:
    block, layout = example("opt")

    def change(matrices: dict[str, Tensor]) -> None:
        matrices["mlp_hidden"][[3, 4], [4, 3]] = torch.nan

    problem = begin(block, layout, make_statistics(block, layout, change=change))
    with pytest.raises(NumericalError, match=r"^block 0, fc2: the Hessian cannot be factored"):
        updated(problem)


def min_max_values(w: Tensor, bits: int, *, symmetric: bool) -> Tensor:
    """Return all values of the min-max grid of one row (or group)."""
    low, high, levels = min(float(w.min()), 0.0), max(float(w.max()), 0.0), 2**bits - 1
    if symmetric:
        high = max(-low, high)
        low = -high
    scale = (high - low) / levels
    zero = 2 ** (bits - 1) if symmetric else round(-low / scale)
    return torch.tensor([scale * (q - zero) for q in range(levels + 1)], dtype=torch.float64)


@pytest.mark.parametrize("group_size", [None, 8])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", range(2, 9))
def test_nearest_weight_is_the_nearest_value_of_the_min_max_grid(
    bits: int, group_size: int | None, *, symmetric: bool
) -> None:
    block, layout = example("bloom")
    settings = resolved(QuantizationSettings(bits=bits, symmetric=symmetric, group_size=group_size))
    fused = linear(block, "self_attention.query_key_value").weight
    fused[:12].abs_()  # rows without a negative weight: their range reaches down to 0 all the same
    for p in layout.projections:
        if p.name not in ("query", "value", "dense"):
            continue
        W = rows_by_hand(block, layout, p.name, p.module).flatten(0, 1).double()
        found = nearest_weight(block, layout, p, settings).double()
        assert found.shape == W.shape
        size = group_size or W.shape[1]
        for row in range(W.shape[0]):
            for w, hat in zip(W[row].split(size), found[row].split(size), strict=True):
                values = min_max_values(w, bits, symmetric=symmetric)
                least = (w[:, None] - values).abs().amin(1)
                torch.testing.assert_close((hat - w).abs(), least, rtol=0, atol=1e-6)
                assert float((hat[:, None] - values).abs().amin(1).max()) < 1e-6


def test_nearest_weight_leaves_the_block_as_it_is() -> None:
    block, layout = example("llama")
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    for p in layout.projections:
        nearest = nearest_weight(block, layout, p, resolved(QuantizationSettings()))
        assert not torch.equal(nearest, projection_weight(block, layout, p))
    for name, tensor in block.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_roles_by_name_are_the_layouts() -> None:
    """What these tests take for granted."""
    for name in EXAMPLES:
        for p in example(name)[1].projections:
            assert p.role is Role(role(p.name))
