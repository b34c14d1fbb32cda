"""Statistics against sums over explicit samples, in float64, on a tiny model of each kind."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from aespa_pl.algorithm.products import Precision
from aespa_pl.algorithm.rotation import rotate_back, through_norm
from aespa_pl.calibration.collector import StatisticsCollector
from aespa_pl.calibration.hessian import Hessian
from aespa_pl.calibration.observe import Observation, observing
from aespa_pl.calibration.statistics import BlockStatistics
from aespa_pl.models import family_of
from aespa_pl.models.family import Attention, BlockLayout, Family, Role
from aespa_pl.models.weights import projection_weight
from tests import reference

LENGTH, SEGMENTS, HEADS, HEAD_SIZE = 7, 8, 4, 6
WIDTH = HEADS * HEAD_SIZE
LLAMA = {
    "hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": 20, "vocab_size": 50,
    "num_hidden_layers": 1, "max_position_embeddings": 16,
}  # fmt: skip


def opt() -> PreTrainedModel:
    return OPTForCausalLM(
        OPTConfig(
            hidden_size=WIDTH, num_attention_heads=HEADS, ffn_dim=20, vocab_size=50, num_hidden_layers=1,
            max_position_embeddings=16, word_embed_proj_dim=WIDTH, dropout=0.0, attention_dropout=0.0,
        )
    )  # fmt: skip


def bloom() -> PreTrainedModel:
    return BloomForCausalLM(BloomConfig(hidden_size=WIDTH, n_head=HEADS, n_layer=1, vocab_size=50))


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**LLAMA, num_key_value_heads=HEADS))


def grouped() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**LLAMA, num_key_value_heads=2))


def qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**LLAMA, num_key_value_heads=2, head_dim=HEAD_SIZE))


def window() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**LLAMA, num_key_value_heads=2, sliding_window=3))


MODELS = [opt, bloom, llama, grouped, window, qwen3]


def make(model_of: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    model = model_of().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.4 if parameter.dim() > 1 else 1.0))
    return model.requires_grad_(requires_grad=False)


def first_block(model: PreTrainedModel) -> tuple[Family, nn.Module, BlockLayout]:
    family = family_of(model.config)
    return family, model.get_submodule(family.blocks_path)[0], family.layout(model.config)


def run_through(model: PreTrainedModel, words: Tensor) -> Observation:
    """Return what the first block does with some segments, everything that can be observed."""
    family, block, layout = first_block(model)
    attention = partial(family.observe_attention, model, block)
    with observing(block, layout.groups, residuals=True, attention=attention) as seen:
        hidden, _ = family.embed(model, words)
        family.run_block(block, hidden, family.arguments(model, hidden))
    return seen


def collect(
    model: PreTrainedModel,
    ids: Tensor,
    batch_size: int,
    before_the_end: Callable[[StatisticsCollector], None] = lambda _: None,
    precision: Precision = "float32",
) -> tuple[BlockStatistics, list[Attention], Tensor]:
    """Return the statistics, what the attention did, and its input ``[tokens, d]``.

    The input is seen by a hook of its own.
    """
    family, block, layout = first_block(model)
    seen: list[Attention] = []
    inputs: list[Tensor] = []
    collector = StatisticsCollector(layout, value=True, query_key=True, precision=precision)
    module = block.get_submodule(layout.groups[0].projections[0].module)
    handle = module.register_forward_pre_hook(lambda _, x: inputs.append(x[0]))
    for part in ids.split(batch_size):
        observation = run_through(model, part)
        collector.add(observation)
        seen.append(observation.attention)
    handle.remove()
    before_the_end(collector)
    statistics = collector.finish(family.norm_weights(block))
    return statistics, seen, torch.cat([x.flatten(0, 1) for x in inputs])


def whole(hessian: Hessian) -> Tensor:
    """Return the matrices ``[heads, d_in, d_in]`` of all heads."""
    return hessian[:]


def shared_by_all(hessian: Hessian) -> Tensor:
    """Return the one matrix ``[d_in, d_in]`` of an input group."""
    assert len(hessian) == 1
    return hessian[:][0]


def attention_statistics(statistics: BlockStatistics) -> dict[str, Tensor]:
    """Return H_V, G_Q and G_K by name."""
    return {
        "attended": whole(statistics.attended),
        "keys": statistics.keys,
        "queries": statistics.queries,
    }


def tokens() -> Tensor:
    return torch.randint(3, 50, (SEGMENTS, LENGTH))


def assert_close(one: BlockStatistics, other: BlockStatistics) -> None:
    """Check that two blocks' statistics agree, but for their shifts."""
    for name, H in one.inputs.items():
        torch.testing.assert_close(whole(H), whole(other.inputs[name]))
    found = attention_statistics(other)
    for kind, expected in attention_statistics(one).items():
        torch.testing.assert_close(found[kind], expected)
    assert one.tokens == other.tokens


@pytest.mark.parametrize("model_of", MODELS)
def test_batches_of_one_and_of_eight_agree(model_of: Callable[[], PreTrainedModel]) -> None:
    model, ids = make(model_of), tokens()
    single, _, _ = collect(model, ids, 1)
    together, _, _ = collect(model, ids, 8)
    assert_close(single, together)


@pytest.mark.parametrize("model_of", MODELS)
def test_products_in_tf32_round_the_operands_and_nothing_else(
    model_of: Callable[[], PreTrainedModel],
) -> None:
    model, ids = make(model_of), tokens()
    exact, near = (collect(model, ids, 3, precision=p)[0] for p in ("float32", "tf32"))
    half = make(model_of).bfloat16()
    exact_half, near_half = (collect(half, ids, 3, precision=p)[0] for p in ("float32", "tf32"))
    for name in exact.inputs:
        H, found = whole(exact.inputs[name]), whole(near.inputs[name])
        assert 1e-7 < float((found - H).norm() / H.norm()) < 2**-10
        assert torch.equal(whole(near_half.inputs[name]), whole(exact_half.inputs[name]))
    rounded = attention_statistics(near)
    for kind, expected in attention_statistics(exact).items():
        found = rounded[kind]
        assert found.dtype == torch.float32
        assert 1e-7 < float((found - expected).norm() / expected.norm()) < 2**-10
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("model_of", MODELS)
def test_collectors_add_up(model_of: Callable[[], PreTrainedModel]) -> None:
    """Two have seen different segments; a third one has seen what does not count."""
    model, ids = make(model_of), tokens()
    together, _, _ = collect(model, ids, 2)
    sums: list[Tensor] = []

    def keep(total: Tensor) -> None:
        sums.append(total.clone())

    def add(total: Tensor) -> None:
        total += sums.pop(0)
        sums.append(total.clone())

    collect(model, ids[:2], 2, lambda collector: collector.add_up(keep, counts=True))
    collect(model, ids[:2], 2, lambda collector: collector.add_up(add, counts=False))
    found, _, _ = collect(model, ids[2:], 2, lambda one: one.add_up(add, counts=True))
    assert_close(together, found)


@pytest.mark.parametrize("model_of", MODELS)
def test_input_hessian_is_the_squared_error_of_the_output(
    model_of: Callable[[], PreTrainedModel],
) -> None:
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


def scores_by_hand(others: Tensor, dW: Tensor, X: Tensor, rotations: list[Tensor]) -> float:
    """Mean over all positions of the squared scores between errors there and all ``others``.

    Under the Kronecker approximation the input x and the position are independent of each other.
    """
    total = 0.0
    for R in rotations:
        total += reference.score_error(R @ dW, X.T, others)
    return total / len(rotations)


@pytest.mark.parametrize("model_of", [opt, bloom, llama, grouped, window])
def test_query_and_key_objectives_are_the_squared_error_of_the_scores(
    model_of: Callable[[], PreTrainedModel],
) -> None:
    model = make(model_of)
    ids = tokens()[:2]
    statistics, seen, X = collect(model, ids, 2)
    rotations = [torch.eye(HEAD_SIZE, dtype=torch.float64)]
    if seen[0].rotation is not None:
        base = model.config.rope_parameters["rope_theta"]
        rotations = [reference.rotation_matrix(t, HEAD_SIZE, base) for t in range(LENGTH)]
    N, H = X.shape[0], shared_by_all(statistics.inputs["attention_input"]).double()
    shared = HEADS // seen[0].key.shape[1]
    dW = torch.randn(HEAD_SIZE, WIDTH, dtype=torch.float64)
    K = seen[0].key.transpose(0, 1).flatten(1, 2)  # [n_kv, tokens, d_h]
    Q = seen[0].query.transpose(0, 1).flatten(1, 2)
    for h in range(HEADS):
        G = statistics.keys[h].double()
        expected = 4 * scores_by_hand(K[h // shared], dW, X, rotations) / N**2
        assert float(torch.trace(G @ dW @ H @ dW.T)) == pytest.approx(expected, rel=1e-4)
    for h in range(HEADS // shared):
        G = statistics.queries[h].double()
        group = range(h * shared, (h + 1) * shared)
        expected = sum(4 * scores_by_hand(Q[g], dW, X, rotations) / N**2 for g in group) / shared
        assert float(torch.trace(G @ dW @ H @ dW.T)) == pytest.approx(expected, rel=1e-4)


def test_observed_query_has_no_scale() -> None:
    """OPT hands its attention function a query that is scaled already."""
    for model_of in (opt, llama):
        model = make(model_of)
        _, seen, _ = collect(model, tokens()[:1], 1)
        scores = seen[0].query[0] @ seen[0].key[0].transpose(1, 2) / HEAD_SIZE**0.5
        scores = scores + torch.full((LENGTH, LENGTH), -torch.inf).triu(1)
        torch.testing.assert_close(torch.softmax(scores, -1), seen[0].probabilities()[0].double())


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
    assert statistics.keys.shape == (HEADS, HEAD_SIZE, HEAD_SIZE)
    weight, x = torch.randn(6, dtype=torch.float64), torch.randn(30, 6, dtype=torch.float64)
    K = torch.randn(9, 6, dtype=torch.float64)
    d = torch.randn(6, dtype=torch.float64)
    expected = 0.0
    for token in x:
        rms = token.square().mean().sqrt()  # held fixed: the part that is left out
        expected += float((K @ (weight * d / rms)).square().sum()) / 30
    inverse = (1 / x.square().mean(-1)).mean()[None]
    G = through_norm((K.T @ K)[None], weight, inverse)[0]
    assert float(d @ G @ d) == pytest.approx(expected)


def test_objectives_of_normed_heads_are_the_squared_error_of_the_scores() -> None:
    """As above; the norm's factor ``weight / rms`` comes before the rotation.

    In the approximation the token's x, its position and its rms are independent of each other.
    """
    model = make(qwen3)
    statistics, seen, X = collect(model, tokens()[:2], 2)
    attention: Any = model.get_submodule("model.layers.0.self_attn")
    base = model.config.rope_parameters["rope_theta"]
    N, H = X.shape[0], shared_by_all(statistics.inputs["attention_input"]).double()
    dW = torch.randn(HEAD_SIZE, WIDTH, dtype=torch.float64)
    sides = (
        (statistics.keys, seen[0].key, attention.q_proj, attention.q_norm),
        (statistics.queries, seen[0].query, attention.k_proj, attention.k_norm),
    )
    for G, other_side, projection, norm in sides:
        heads = G.shape[0]
        rotations = [
            reference.rotation_matrix(t, HEAD_SIZE, base) @ torch.diag(norm.weight)
            for t in range(LENGTH)
        ]
        square = projection(X).view(N, heads, HEAD_SIZE).square().mean(-1)
        gain = (1 / (square + norm.variance_epsilon)).mean(0)
        others = other_side.transpose(0, 1).flatten(1, 2)  # [its heads, tokens, d_h]
        for h in range(heads):
            group = [h // 2] if heads == HEADS else [2 * h, 2 * h + 1]
            error = sum(scores_by_hand(others[g], dW, X, rotations) for g in group) / len(group)
            expected = float(gain[h]) * 4 * error / N**2
            found = float(torch.trace(G[h].double() @ dW @ H @ dW.T))
            assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("model_of", MODELS)
def test_statistics_of_a_model_in_half_precision_are_summed_in_float32(
    model_of: Callable[[], PreTrainedModel],
) -> None:
    """What was seen, once more in float64; sums in bfloat16 would be off by a per cent."""
    model = make(model_of).bfloat16()
    statistics, seen, X = collect(model, tokens(), 8)
    N = X.shape[0]
    found = {name: whole(H) for name, H in statistics.inputs.items()}
    found["attended"] = whole(statistics.attended)
    if seen[0].rotation is None:
        found |= {"keys": statistics.keys, "queries": statistics.queries}
        for name, heads in (("keys", seen[0].key), ("queries", seen[0].query)):
            rows = heads.double().transpose(0, 1).flatten(1, 2)
            expected = 2 / N * torch.stack([x.T @ x for x in rows])
            torch.testing.assert_close(found[name].double(), expected, rtol=1e-4, atol=1e-3)
    assert {statistic.dtype for statistic in found.values()} == {torch.float32}
    expected = 2 / N * (X.double().T @ X.double())
    H = shared_by_all(statistics.inputs["attention_input"]).double()
    torch.testing.assert_close(H, expected, rtol=1e-4, atol=1e-3)
    A = seen[0].probabilities().double().unflatten(1, (len(statistics.attended), -1))
    AX = A @ X.double().view(SEGMENTS, 1, 1, LENGTH, WIDTH)
    expected = 2 / N * torch.einsum("bhsld,bhsle->hde", AX, AX) / A.shape[2]
    torch.testing.assert_close(found["attended"].double(), expected, rtol=1e-4, atol=1e-3)


def collect_both(
    model: PreTrainedModel, ids: Tensor, other: Tensor, batch_size: int, *, value: bool = True
) -> tuple[BlockStatistics, Mapping[str, list[Tensor]], list[Attention]]:
    """Return the statistics of ids as the quantized and of ``other`` as the original stream.

    Also the inputs of each group, in pairs of original and quantized, and what attention did.
    """
    family, block, layout = first_block(model)
    collector = StatisticsCollector(layout, value=value, query_key=True)
    inputs: dict[str, list[Tensor]] = {group.name: [] for group in layout.groups}
    seen: list[Attention] = []
    for group in layout.groups:
        block.get_submodule(group.projections[0].module).register_forward_pre_hook(
            lambda _, x, name=group.name: inputs[name].append(x[0])
        )
    for part, words in zip(ids.split(batch_size), other.split(batch_size), strict=True):
        original, quantized = run_through(model, words), run_through(model, part)
        collector.add(quantized, original)
        seen += [original.attention, quantized.attention]
    return collector.finish(family.norm_weights(block)), inputs, seen


@pytest.mark.parametrize("model_of", MODELS)
def test_shifts_are_the_mean_product_of_difference_and_input(
    model_of: Callable[[], PreTrainedModel],
) -> None:
    model, ids, other = make(model_of), tokens(), tokens()
    plain, _, _ = collect(model, ids, 3)
    statistics, inputs, _ = collect_both(model, ids, other, 3)
    assert statistics.shifts.inputs.keys() == {"attention_input", "mlp_input"}
    for name in statistics.shifts.inputs:
        seen = inputs[name]
        original, X = (torch.cat([x.flatten(0, -2) for x in seen[i::2]]).T for i in (0, 1))
        expected = (
            2
            / X.shape[1]
            * sum(torch.outer(original[:, t] - X[:, t], X[:, t]) for t in range(X.shape[1]))
        )
        found = statistics.shifts.inputs[name].double()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    assert_close(statistics, plain)  # those of the quantized stream, as without


@pytest.mark.parametrize("model_of", MODELS)
def test_value_shift_is_that_of_the_attention_output(
    model_of: Callable[[], PreTrainedModel],
) -> None:
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
            statistics.shifts.attended[head].double(),
            weight[head].double() @ expected,
            rtol=1e-4,
            atol=1e-3,
        )


@pytest.mark.parametrize("model_of", MODELS)
def test_output_shifts_are_those_of_the_residual_stream(
    model_of: Callable[[], PreTrainedModel],
) -> None:
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
        weight = projection_weight(block, layout, p)
        X_original, X = (x.flatten(0, -2) for x in inputs[group.name][:2])
        R_original, R = (run_through(model, words).residuals[group.name] for words in (other, ids))
        Y = X_original @ weight.T + R_original.flatten(0, -2) - X @ weight.T - R.flatten(0, -2)
        expected = 2 / X.shape[0] * Y.T @ X
        torch.testing.assert_close(found[group.name].double(), expected, rtol=1e-4, atol=1e-3)
    after = []
    for words in (other, ids):
        hidden, _ = family.embed(model, words)
        after.append(family.run_block(block, hidden, family.arguments(model, hidden)).flatten(0, 1))
    X = inputs["mlp_hidden"][1].flatten(0, -2)
    expected = 2 / X.shape[0] * (after[0] - after[1]).T @ X
    torch.testing.assert_close(found["mlp_hidden"].double(), expected, rtol=1e-4, atol=1e-3)


def test_without_the_original_stream_there_are_no_shifts() -> None:
    statistics, _, _ = collect(make(opt), tokens(), 3)
    assert statistics.shifts is None


def test_layerwise_values_have_no_shift_of_their_own() -> None:
    statistics, _, _ = collect_both(make(opt), tokens(), tokens(), 3, value=False)
    assert statistics.attended is None
    assert statistics.shifts.attended is None
    assert len(statistics.shifts.inputs) == len(statistics.shifts.outputs) == 2
