"""What enters the rounding is what the specification names: Hessians, weights, targets, dead inputs."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from aespa_pl.block.grids import fit_grids
from aespa_pl.block.quantize import correct
from aespa_pl.calibration.statistics import Reached, Shifts
from aespa_pl.distributed.processes import ALONE
from aespa_pl.settings.quantization import ObjectiveSettings
from tests.block.blocks import FEW, begin, example, linear, make_statistics, role, rows_by_hand
from tests.models.examples import every_example


def damped(H: Tensor, damping: float) -> Tensor:
    """Add ``damping`` times the mean diagonal to the diagonal, entry by entry."""
    H = H.double().clone()
    mean = sum(float(H[j, j]) for j in range(H.shape[0])) / H.shape[0]
    for j in range(H.shape[0]):
        H[j, j] += damping * mean
    return H


@pytest.mark.parametrize("value", [True, False])
@every_example
def test_each_projection_meets_the_hessian_of_its_role(name: str, *, value: bool) -> None:
    block, layout = example(name)
    statistics = make_statistics(block, layout, value=value and layout.quantizes_values)
    raw = copy.deepcopy(statistics)
    problem = begin(block, layout, statistics, damping=0.3)
    problem.damp(0.03)  # from what they were before the first
    for name, projections in (entry for group in layout.groups for entry in group.inputs.items()):
        for p in projections:
            matrices = [raw.inputs[name][:][0]]
            if role(p.name) == "value" and value:
                assert raw.attended is not None
                matrices = list(raw.attended[:])
                assert len(matrices) == layout.key_value_heads
            expected = torch.stack([damped(H, 0.03) for H in matrices])
            torch.testing.assert_close(problem.projections[p.name].hessian[:].double(), expected)


@pytest.mark.parametrize(("tokens", "share"), [(10**6, 0.01), (1, 0.3)])
@pytest.mark.parametrize("name", ["opt", "bloom", "llama-grouped"])
def test_without_a_setting_few_tokens_are_damped_more(name: str, tokens: int, share: float) -> None:
    block, layout = example(name)
    statistics = replace(make_statistics(block, layout), tokens=tokens)
    raw = copy.deepcopy(statistics)
    problem = begin(block, layout, statistics, damping="auto")
    for name, projections in (entry for group in layout.groups for entry in group.inputs.items()):
        for p in (p for p in projections if role(p.name) != "value"):
            expected = damped(raw.inputs[name][:][0], share)[None]
            torch.testing.assert_close(problem.projections[p.name].hessian[:].double(), expected)


def test_an_expert_is_damped_by_its_own_tokens() -> None:
    block, layout = example("llama")
    name = list(layout.groups[-1].inputs)[-1]
    reached = {name: Reached(tokens=10**6, layer_share=0.0)}
    statistics = replace(make_statistics(block, layout), tokens=1, reached=reached)
    raw = copy.deepcopy(statistics)
    problem = begin(block, layout, statistics, damping="auto")
    for group in layout.groups:
        for of, (first, *_) in group.inputs.items():
            if role(first.name) != "value":
                expected = damped(raw.inputs[of][:][0], 0.01 if of == name else 0.3)[None]
                torch.testing.assert_close(problem.projections[first.name].hessian[:].double(), expected)


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
        expected = {"query": statistics.g_query, "key": statistics.g_key}.get(role(p.projection.name))
        if expected is None:
            assert p.other_side is None
        else:
            added = p.other_side - expected  # a part of each head's mean diagonal, on the diagonal
            share = ObjectiveSettings().query_key_damping
            mean = expected.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None]
            torch.testing.assert_close(added, share * mean * torch.eye(added.shape[-1]), rtol=1e-3, atol=1e-6)
            assert p.other_side.shape[0] == p.weight.shape[0]


@every_example
def test_targets_are_the_formula_with_the_hessian_of_the_role(name: str) -> None:
    block, layout = example(name)
    statistics = make_statistics(block, layout, value=layout.quantizes_values)
    d = len(statistics.inputs["attention_input"][:][0])
    columns = {name: len(H[:][0]) for name, H in statistics.inputs.items()}
    joins = {name for name in columns if name.endswith(("output", "hidden"))}
    inputs = {name: torch.randn(columns[name], columns[name]) for name in columns.keys() - joins}
    outputs = {name: torch.randn(d, columns[name]) for name in joins}
    raw = copy.deepcopy(statistics)
    attended = torch.randn(layout.key_value_heads, layout.head_dim, d) if layout.quantizes_values else None
    quantized = begin(block, layout, statistics, damping=0.02)
    correct(quantized, Shifts(inputs, outputs, attended), 0.3)
    for name, projections in (entry for group in layout.groups for entry in group.inputs.items()):
        for p in projections:
            W = rows_by_hand(block, layout, p.name, p.module).double()
            for head in range(W.shape[0]):
                H = raw.inputs[name][:][0]
                if role(p.name) == "value":
                    assert raw.attended is not None
                    assert attended is not None
                    H, change = raw.attended[:][head], attended[head].double()
                elif name in outputs:
                    change = outputs[name].double()
                else:
                    change = W[head] @ inputs[name].double()
                expected = W[head] + 0.3 * change @ torch.linalg.inv(damped(H, 0.02))
                torch.testing.assert_close(
                    quantized.projections[p.name].weight[head].double(), expected, rtol=1e-3, atol=1e-3
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


def test_of_few_tokens_weights_of_dead_inputs_stay() -> None:
    block, layout = example("llama-grouped")
    made = make_statistics(block, layout, change=lambda m: kill(m["mlp_hidden"], 2))
    columns = linear(block, "mlp.down_proj").in_features
    for tokens, stay in ((columns - 1, True), (columns, False)):
        weight = begin(block, layout, replace(made, tokens=tokens)).projections["down_proj"].weight
        assert bool(weight[:, :, 2].any()) is stay


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


def test_scales_of_weights_beyond_what_float16_reaches_are_finite() -> None:
    block, layout = example("opt")
    with torch.no_grad():
        linear(block, "self_attn.q_proj").weight[0, 0] = 1e8
    quantized = begin(block, layout, make_statistics(block, layout))
    fit_grids(quantized, FEW, ALONE)
    assert quantized.projections["q_proj"].folded_grid.scale.isfinite().all()
