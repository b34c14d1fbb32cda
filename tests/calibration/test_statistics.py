"""Statistics give the squared errors of their objectives, against sums over explicit samples."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from aespa_pl.algorithm.second_moments import rotate_back, through_norm
from tests import reference
from tests.calibration.collected import (
    HEAD_SIZE,
    HEADS,
    LENGTH,
    MODELS,
    SEGMENTS,
    WIDTH,
    bloom,
    collect,
    ernie,
    gemma3,
    gemma4,
    glm4,
    granite,
    grouped,
    hunyuan,
    hybrid,
    llama,
    make,
    ministral3,
    olmo2,
    opt,
    phi3,
    qwen3,
    shared_by_all,
    smollm3,
    tokens,
    window,
)


@pytest.mark.parametrize("model_of", MODELS)
def test_input_hessian_is_the_squared_error_of_the_output(model_of: Callable[[], PreTrainedModel]) -> None:
    statistics, _, X = collect(make(model_of), tokens(), 3)
    dW = torch.randn(2, WIDTH, dtype=torch.float64)
    expected = 2 * reference.output_error(dW, X.T) / X.shape[0]
    H = shared_by_all(statistics.inputs["attention_input"]).double()
    assert float(torch.trace(dW @ H @ dW.T)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("model_of", MODELS)
def test_value_hessian_is_the_squared_error_of_the_attention_output(
    model_of: Callable[[], PreTrainedModel],
) -> None:
    """Summed over the query heads of a value head, whose number the mean divides by."""
    model = make(model_of)
    statistics, seen, X = collect(model, tokens(), 8)
    X = X.view(SEGMENTS, LENGTH, WIDTH)
    value_heads = len(statistics.attended)
    shared, probabilities = HEADS // value_heads, seen[0].probabilities()
    for head in range(value_heads):
        dW = torch.randn(3, WIDTH, dtype=torch.float64)
        expected = 0.0
        for segment in range(SEGMENTS):
            for h in range(head * shared, (head + 1) * shared):
                A = probabilities[segment, h]
                expected += reference.attention_output_error(dW, X[segment].T, A)
        H = statistics.attended[head : head + 1][0].double()
        found = float(torch.trace(dW @ H @ dW.T)) * X.shape[0] * LENGTH / 2 * shared
        assert found == pytest.approx(expected, rel=1e-4)


def test_value_hessian_has_what_the_norm_multiplies_each_error_by() -> None:
    """The error ``dW x`` of a token's value is divided by its rms, by no less than a fifth of the median."""
    model = make(gemma4)
    statistics, seen, X = collect(model, tokens(), SEGMENTS)
    attention: Any = model.get_submodule("model.layers.0.self_attn")
    values = attention.v_proj(X).view(SEGMENTS, LENGTH, -1, HEAD_SIZE)
    inverse = (values.square().mean(-1) + model.config.rms_norm_eps).rsqrt()  # [segments, L, n_kv]
    inverse = inverse.minimum(5 * inverse.median(1, keepdim=True).values)
    heads = inverse.shape[-1]
    shared, dW = HEADS // heads, torch.randn(3, WIDTH, dtype=torch.float64)
    errors = (X @ dW.T).view(SEGMENTS, 1, LENGTH, -1)
    for head in range(heads):
        A = seen[0].probabilities(slice(head * shared, (head + 1) * shared))
        expected = float((A @ (errors * inverse[:, None, :, head, None])).square().sum())
        H = statistics.attended[head : head + 1][0].double()
        found = float(torch.trace(dW @ H @ dW.T)) * X.shape[0] / 2 * shared
        assert found == pytest.approx(expected, rel=1e-4)


def test_value_hessian_is_the_mean_error_behind_the_gate_over_the_channels_of_a_head() -> None:
    """The library's own attention, with the same error in one row of V after the other."""
    model, ids = make(hybrid), tokens()
    statistics, _, X = collect(model, ids, 3)
    attention: Any = model.get_submodule("model.layers.0.self_attn")
    outputs: list[Tensor] = []
    attention.o_proj.register_forward_pre_hook(lambda _, x: outputs.append(x[0]))
    model(ids, use_cache=False)
    error = torch.randn(WIDTH, dtype=torch.float64)
    weight, shared = attention.v_proj.weight.data, HEADS // len(statistics.attended)
    for head in range(len(statistics.attended)):
        expected = 0.0
        for row in range(head * HEAD_SIZE, (head + 1) * HEAD_SIZE):
            weight[row] += error
            model(ids, use_cache=False)
            weight[row] -= error
            expected += float((outputs[-1] - outputs[0]).square().sum()) / HEAD_SIZE
        H = statistics.attended[head : head + 1][0].double()
        found = float(error @ H @ error) * X.shape[0] / 2 * shared
        assert found == pytest.approx(expected, rel=1e-4)


def scores_by_hand(others: Tensor, dW: Tensor, X: Tensor, rotations: list[Tensor]) -> float:
    """Mean over all positions of the squared scores between errors there and all ``others``.

    Under the Kronecker approximation the input x and the position are independent of each other.
    """
    total = 0.0
    for R in rotations:
        total += reference.score_error(R @ dW, X.T, others)
    return total / len(rotations)


def rotations_of(model: PreTrainedModel, *, queries: bool) -> list[Tensor]:
    """Return what queries, or keys, are multiplied by at each position."""
    kind, config = model.config.model_type, model.config
    if kind in ("opt", "bloom", "smollm3"):
        return [torch.eye(HEAD_SIZE, dtype=torch.float64)]
    rope = config.rope_parameters
    base = rope.get("full_attention", rope)["rope_theta"]
    turned = 4 if kind in ("phi3", "qwen3_5_text", "glm4") else HEAD_SIZE
    neighbours = kind in ("ernie4_5", "glm4")
    found = []
    for t in range(LENGTH):
        R = torch.eye(HEAD_SIZE, dtype=torch.float64)
        R[:turned, :turned] = reference.rotation_matrix(t, turned, base, neighbours=neighbours)
        far = kind == "ministral3" and queries
        found.append(R * (1 + 0.5 * math.log(1 + t // 3)) if far else R)
    return found


@pytest.mark.parametrize(
    "model_of", [opt, bloom, llama, grouped, window, granite, phi3, smollm3, ministral3, ernie, glm4]
)
def test_query_and_key_objectives_are_the_squared_error_of_the_scores(
    model_of: Callable[[], PreTrainedModel],
) -> None:
    model = make(model_of)
    ids = tokens()[:2]
    statistics, seen, X = collect(model, ids, 2)
    rotations = rotations_of(model, queries=True)
    N, H = X.shape[0], shared_by_all(statistics.inputs["attention_input"]).double()
    shared = HEADS // seen[0].key.shape[1]
    dW = torch.randn(HEAD_SIZE, WIDTH, dtype=torch.float64)
    K = seen[0].key.transpose(0, 1).flatten(1, 2)  # [n_kv, tokens, d_h]
    Q = seen[0].query.transpose(0, 1).flatten(1, 2)
    for h in range(HEADS):
        G = statistics.g_query[h].double()
        expected = 4 * scores_by_hand(K[h // shared], dW, X, rotations) / N**2
        assert float(torch.trace(G @ dW @ H @ dW.T)) == pytest.approx(expected, rel=1e-4)
    rotations = rotations_of(model, queries=False)
    for h in range(HEADS // shared):
        G = statistics.g_key[h].double()
        group = range(h * shared, (h + 1) * shared)
        expected = sum(4 * scores_by_hand(Q[g], dW, X, rotations) / N**2 for g in group) / shared
        assert float(torch.trace(G @ dW @ H @ dW.T)) == pytest.approx(expected, rel=1e-4)


def test_rotating_back_equals_the_mean_over_positions() -> None:
    G = torch.randn(3, 8, 8, dtype=torch.float64)
    G = G @ G.transpose(1, 2)
    rotations = [reference.rotation_matrix(t, 8, 100.0) for t in range(5)]
    cos = torch.stack([R.diagonal() for R in rotations])
    sin = torch.stack([torch.cat([-R[:4, 4:].diagonal()] * 2) for R in rotations])
    expected = sum(R.T @ G @ R for R in rotations) / 5
    torch.testing.assert_close(rotate_back(G, cos, sin), expected)


def test_norm_on_heads_scales_the_error_of_each_token() -> None:
    """Against the derivative of the norm by autograd, without the part that changes its rms."""
    model = make(qwen3)
    statistics, seen, _ = collect(model, tokens(), 8)
    assert seen[0].query_inverse_square is not None
    assert statistics.g_query.shape == (HEADS, HEAD_SIZE, HEAD_SIZE)
    weight, x = torch.randn(6, dtype=torch.float64), torch.randn(30, 6, dtype=torch.float64)
    K = torch.randn(9, 6, dtype=torch.float64)
    d = torch.randn(6, dtype=torch.float64)
    expected = 0.0
    for token in x:
        rms = token.square().mean().sqrt()  # held fixed: the part that is left out
        expected += float((K @ (weight * d / rms)).square().sum()) / 30
    inverse = (1 / x.square().mean(-1)).mean()[None]
    G = through_norm((K.T @ K)[None], weight[None], inverse)[0]
    assert float(d @ G @ d) == pytest.approx(expected)


@pytest.mark.parametrize("model_of", [qwen3, gemma3, gemma4, olmo2, hybrid, hunyuan])
def test_objectives_of_normed_heads_are_the_squared_error_of_the_scores(
    model_of: Callable[[], PreTrainedModel],
) -> None:
    """As above; the norm's factor ``weight / rms`` comes before the rotation, in Hunyuan after it.

    In the approximation the token's x, its position and its rms are independent of each other.
    """
    model = make(model_of)
    statistics, seen, X = collect(model, tokens()[:2], 2)
    attention: Any = model.get_submodule("model.layers.0.self_attn")
    N, H = X.shape[0], shared_by_all(statistics.inputs["attention_input"]).double()
    dW = torch.randn(HEAD_SIZE, WIDTH, dtype=torch.float64)
    counted = X
    if model_of is olmo2:  # X is the residual stream, whose tokens count relative to their size
        size = X.square().mean(-1, keepdim=True)
        counted = X * (1 / size / (1 / size).mean()).sqrt()
    names = ("query_layernorm", "key_layernorm") if model_of is hunyuan else ("q_norm", "k_norm")
    norms = [getattr(attention, name) for name in names]
    sides = (
        (statistics.g_query, seen[0].key, attention.q_proj, norms[0]),
        (statistics.g_key, seen[0].query, attention.k_proj, norms[1]),
    )
    for G, other_side, projection, norm in sides:
        heads = G.shape[0]
        weights = norm.weight + (1 if model_of in (gemma3, hybrid) else 0)
        weights = weights.view(-1, HEAD_SIZE).expand(heads, HEAD_SIZE)
        # in the rows of the gated a gate follows each query
        square = projection(X).view(N, heads, -1)[..., :HEAD_SIZE].square().mean(-1)
        if model_of is olmo2:  # one norm for all heads
            square = square.mean(1, keepdim=True).expand(N, heads)
        gain = (1 / (square + model.config.rms_norm_eps)).mean(0)
        others = other_side.transpose(0, 1).flatten(1, 2)  # [its heads, tokens, d_h]
        for h in range(heads):
            of_weights = torch.diag(weights[h])
            rotations = [
                of_weights @ R if model_of is hunyuan else R @ of_weights
                for R in rotations_of(model, queries=G is statistics.g_query)
            ]
            group = [h // 2] if heads == HEADS else [2 * h, 2 * h + 1]
            error = sum(scores_by_hand(others[g], dW, counted, rotations) for g in group) / len(group)
            expected = float(gain[h]) * 4 * error / N**2
            found = float(torch.trace(G[h].double() @ dW @ H @ dW.T))
            assert found == pytest.approx(expected, rel=1e-4)
