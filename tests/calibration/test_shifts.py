"""Shifts are mean products of what the original stream differs by and the quantized stream."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from aespa_pl.algorithm import second_moments
from aespa_pl.calibration.collector import StatisticsCollector
from aespa_pl.calibration.statistics import BlockStatistics
from aespa_pl.models.family import Role
from aespa_pl.models.observed import Attention
from aespa_pl.models.weights import projection_weight
from tests import massive
from tests.calibration.collected import (
    HEAD_SIZE,
    HEADS,
    LENGTH,
    MODELS,
    SEGMENTS,
    WIDTH,
    assert_close,
    collect,
    first_block,
    gemma3,
    hybrid,
    llama,
    make,
    olmo2,
    opt,
    qwen3,
    run_through,
    shared_by_all,
    tokens,
)


def collect_both(
    model: PreTrainedModel, ids: Tensor, other: Tensor, batch_size: int, *, value: bool = True
) -> tuple[BlockStatistics, Mapping[str, list[Tensor]], list[Attention]]:
    """Return the statistics of ids as the quantized and of ``other`` as the original stream.

    Also the inputs of each group, in pairs of original and quantized, and what attention did.
    """
    family, block, layout = first_block(model)
    sums = StatisticsCollector(layout, value=value, query_key=True)
    inputs: dict[str, list[Tensor]] = {group.name: [] for group in layout.groups}
    seen: list[Attention] = []
    for group in layout.groups:
        block.get_submodule(group.projections[0].module).register_forward_pre_hook(
            lambda _, x, name=group.name: inputs[name].append(x[0])
        )
    for part, words in zip(ids.split(batch_size), other.split(batch_size), strict=True):
        original, quantized = run_through(model, words), run_through(model, part)
        sums.add(quantized, original)
        seen += [original.attention, quantized.attention]
    return sums.finish(family.norm_weights(block)), inputs, seen


@pytest.mark.parametrize("model_of", MODELS)
def test_shifts_are_the_mean_product_of_difference_and_input(model_of: Callable[[], PreTrainedModel]) -> None:
    model, ids, other = make(model_of), tokens(), tokens()
    plain, _, _ = collect(model, ids, 3)
    statistics, inputs, _ = collect_both(model, ids, other, 3)
    assert statistics.shifts.inputs.keys() == {"attention_input", "mlp_input"}
    for name in statistics.shifts.inputs:
        seen = inputs[name]
        original, X = (torch.cat([x.flatten(0, -2) for x in seen[i::2]]).T for i in (0, 1))
        expected = (
            2 / X.shape[1] * sum(torch.outer(original[:, t] - X[:, t], X[:, t]) for t in range(X.shape[1]))
        )
        found = statistics.shifts.inputs[name].double()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    # those of the quantized stream, as without; Hessians of outputs have weights
    inputs_alone = {name: statistics.inputs[name] for name in statistics.shifts.inputs}
    assert_close(replace(statistics, inputs=inputs_alone), plain)


@pytest.mark.parametrize("model_of", MODELS)
def test_value_shift_is_that_of_the_attention_output(model_of: Callable[[], PreTrainedModel]) -> None:
    """The shift is V's weights times the mean product of what A X differs by and A X."""
    model = make(model_of)
    _, block, layout = first_block(model)
    value = next(p for p in layout.projections if p.role is Role.VALUE)
    weight = projection_weight(block, layout, value).unflatten(0, (-1, HEAD_SIZE))
    statistics, inputs, seen = collect_both(model, tokens(), tokens(), SEGMENTS)
    original, X = inputs["attention_input"]
    A_original, A = (attention.probabilities() for attention in seen)
    value_heads = len(statistics.shifts.attended)
    shared = HEADS // value_heads
    for head in range(value_heads):
        expected = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
        for segment in range(SEGMENTS):
            for h in range(head * shared, (head + 1) * shared):
                AX_original = A_original[segment, h] @ original[segment]
                AX = A[segment, h] @ X[segment]
                expected += (AX_original - AX).T @ AX
        expected *= 2 / (SEGMENTS * LENGTH) / shared
        torch.testing.assert_close(
            statistics.shifts.attended[head].double(), weight[head].double() @ expected, rtol=1e-4, atol=1e-3
        )


def test_value_shift_behind_a_gate_is_in_proportion_to_the_squared_gate_of_its_row() -> None:
    """So H_V, which has the mean of a head's squared gates, does not move rows too far."""
    model = make(hybrid)
    statistics, inputs, seen = collect_both(model, tokens(), tokens(), SEGMENTS)
    attended_original, attended = inputs["attention_output"]  # [B, L, n_h d_h]
    shift = (attended_original - attended).unflatten(-1, (HEADS, HEAD_SIZE))
    A, gate, X = seen[1].probabilities(), seen[1].gate, inputs["attention_input"][1]
    shared = HEADS // len(statistics.shifts.attended)
    for head, found in enumerate(statistics.shifts.attended):
        expected, squares = torch.zeros(HEAD_SIZE, WIDTH, dtype=torch.float64), torch.zeros(HEAD_SIZE)
        for segment in range(SEGMENTS):
            for h in range(head * shared, (head + 1) * shared):
                g = gate[segment, h]  # [L, d_h]
                expected += (g * shift[segment, :, h]).T @ A[segment, h] @ X[segment]
                squares = squares + g.square().sum(0)
        expected *= 2 / (SEGMENTS * LENGTH) / shared * (squares.mean() / squares)[:, None]
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)


def weighted_shift(Y_original: Tensor, Y: Tensor, X: Tensor) -> Tensor:
    """Return the mean product of ``Y_original - Y`` and X over the tokens, each with its weight."""
    pairs = zip(Y_original.split(LENGTH), Y.split(LENGTH), strict=True)
    weights = torch.cat([massive.weights(original, quantized) for original, quantized in pairs])
    return 2 / len(X) * (weights * (Y_original - Y).T) @ X


@pytest.mark.parametrize("model_of", MODELS)
def test_output_shifts_are_those_of_the_residual_stream(model_of: Callable[[], PreTrainedModel]) -> None:
    """The first ends where the feed-forward network begins, the second is the block's output."""
    model, ids, other = make(model_of), tokens(), tokens()
    family, block, layout = first_block(model)
    statistics, inputs, _ = collect_both(model, ids, other, SEGMENTS)
    found = statistics.shifts.outputs
    assert found.keys() == {"attention_output", "mlp_hidden"}
    for group in layout.groups:
        if group.name not in found:
            continue
        (p,) = group.projections
        factor = p.residual_factor  # the shift is in the units of the output
        weight = projection_weight(block, layout, p)
        X_original, X = (x.flatten(0, -2) for x in inputs[group.name][:2])
        R_original, R = (run_through(model, words).residuals[group.name] for words in (other, ids))
        Y_original, Y = (X_original @ weight.T + R_original.flatten(0, -2), X @ weight.T + R.flatten(0, -2))
        expected = weighted_shift(Y_original, Y, X)
        torch.testing.assert_close(found[group.name].double(), expected, rtol=1e-4, atol=1e-3)
    after = []
    for words in (other, ids):
        hidden, _ = family.embed(model, words)
        output = family.run_block(block, hidden, family.arguments(model, hidden)).flatten(0, 1)
        after.append(output / factor)
    expected = weighted_shift(after[0], after[1], inputs["mlp_hidden"][1].flatten(0, -2))
    torch.testing.assert_close(found["mlp_hidden"].double(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("model_of", [opt, llama, qwen3])  # BLOOM has a norm on embeddings
def test_beside_the_original_stream_massive_tokens_count_less_in_the_hessians_of_outputs(
    model_of: Callable[[], PreTrainedModel],
) -> None:
    model, ids = make(model_of), tokens()
    family, block, _ = first_block(model)
    with torch.no_grad():
        model.get_input_embeddings().weight[ids[0, 5]] *= 1000
    statistics, inputs, _ = collect_both(model, ids, ids, SEGMENTS)
    hidden, _ = family.embed(model, ids)
    Y = family.run_block(block, hidden, family.arguments(model, hidden))
    X = inputs["mlp_hidden"][1]
    weights = torch.cat([massive.weights(y, y) for y in Y])
    assert weights.min() < 0.9
    expected = 2 / len(weights) * (weights * X.flatten(0, -2).T) @ X.flatten(0, -2)
    found = shared_by_all(statistics.inputs["mlp_hidden"])
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("largest", [5.0, 1.1])
@pytest.mark.parametrize("model_of", [gemma3, olmo2])
def test_errors_before_a_norm_count_as_they_reach_the_residual_stream(
    model_of: Callable[[], PreTrainedModel], largest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The norm behind W multiplies the error ``dW x`` of a token by its weight g, over the token's rms r."""
    monkeypatch.setattr(second_moments, "LARGEST", largest)
    model, ids, other = make(model_of), tokens(), tokens()
    _, block, layout = first_block(model)
    statistics, inputs, _ = collect_both(model, ids, other, SEGMENTS)
    assert statistics.shifts.outputs.keys() == {"attention_output", "mlp_hidden"}
    names = {"attention_output": "post_attention_layernorm", "mlp_hidden": "post_feedforward_layernorm"}
    for group in layout.groups:
        if group.name not in names:
            continue
        weight, norm = projection_weight(block, layout, group.projections[0]), names[group.name]
        g = block.get_parameter(f"{norm}.weight") + (1 if model_of is gemma3 else 0)
        X_original, X = (x.flatten(0, -2) for x in inputs[group.name][:2])
        R_original, R = (
            run_through(model, words).residuals[group.name].flatten(0, -2) for words in (other, ids)
        )
        (Y_original, _), (Y, r) = (
            (residual + g * y / rms, rms)
            for residual, y in ((R_original, X_original @ weight.T), (R, X @ weight.T))
            for rms in [(y.square().mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt()]
        )
        pairs = zip(Y_original.split(LENGTH), Y.split(LENGTH), strict=True)
        w = torch.cat([massive.weights(original, quantized) for original, quantized in pairs])[:, None]
        r = torch.cat([s.maximum((1 / s).median().reciprocal() / largest) for s in r.split(LENGTH)])
        mean = (w / r.square()).mean()
        H = 2 / len(X) * (w / r.square() * X).T @ X / mean
        found = shared_by_all(statistics.inputs[group.name]).double()
        torch.testing.assert_close(found, H, rtol=1e-4, atol=1e-3)
        # g dW x / r is to be the change of the stream; rows whose g is small are not moved too far
        divided = (Y_original - Y) * g / (g.square() + 0.01 * g.square().mean())
        shift = 2 / len(X) * (w / r * divided).T @ X / mean
        torch.testing.assert_close(
            statistics.shifts.outputs[group.name].double(), shift, rtol=1e-3, atol=1e-3
        )


def test_errors_of_what_reads_the_residual_stream_itself_count_relative_to_it() -> None:
    """In OLMo a norm comes after such a projection, so that tokens of all sizes are of the same size."""
    model, ids, other = make(olmo2), tokens(), tokens()
    with torch.no_grad():
        model.get_input_embeddings().weight[ids[0, 5]] *= 100
    statistics, inputs, _ = collect_both(model, ids, other, SEGMENTS)
    assert statistics.shifts.inputs.keys() == {"attention_input", "mlp_input"}
    for name, found in statistics.shifts.inputs.items():
        original, X = (x.flatten(0, -2) for x in inputs[name][:2])
        weights = 1 / X.square().mean(-1, keepdim=True)
        share = 2 / len(X) / weights.mean()
        H = shared_by_all(statistics.inputs[name]).double()
        torch.testing.assert_close(H, share * (weights * X).T @ X, rtol=1e-4, atol=1e-3)
        expected = share * (weights * (original - X)).T @ X
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)


def test_without_the_original_stream_there_are_no_shifts() -> None:
    statistics, _, _ = collect(make(opt), tokens(), 3)
    assert statistics.shifts is None


def test_layerwise_values_have_no_shift_of_their_own() -> None:
    statistics, _, _ = collect_both(make(opt), tokens(), tokens(), 3, value=False)
    assert statistics.attended is None
    assert statistics.shifts.attended is None
    assert len(statistics.shifts.inputs) == len(statistics.shifts.outputs) == 2
