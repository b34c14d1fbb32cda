"""Statistics of experts are those of the tokens that are routed to them, token by token in loops."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN

from aespa_pl.algorithm.second_moments import bounded
from aespa_pl.calibration.collector import StatisticsCollector
from aespa_pl.calibration.observe import Observation, observing
from aespa_pl.calibration.statistics import BlockStatistics, Reached
from aespa_pl.models import family_of
from tests import massive
from tests.models.examples import make_ids, make_ours

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
"""Statistics are float32."""
SIGMOIDS = ("glm4_moe", "lfm2_moe", "minimax_m2", "glm4_moe_lite", "deepseek_v3")
"""Model types whose experts' scores are sigmoids."""


class Bench:
    """Holds a block of experts, and what it does with words."""

    def __init__(self, name: str = "qwen3-moe") -> None:
        self.model = make_ours(name, torch.float32)
        self.family = family_of(self.model.config)
        layouts = self.family.layouts(self.model.config)
        index = len(layouts) - 1  # the first of some are dense
        self.layout, self.block = layouts[index], self.model.get_submodule(self.family.blocks_path)[index]
        assert self.layout.mixture is not None
        self.mixture = self.layout.mixture
        self.experts = [f"{self.mixture.experts}.{number}" for number in range(self.mixture.count)]
        self.experts += [] if self.mixture.shared is None else [self.mixture.shared]
        self.input = "mlp_input" if self.mixture.input_norm is None else "experts_input"

    def observation(self, ids: Tensor) -> Observation:
        attention = partial(self.family.observe_attention, self.model, self.block)
        observed = observing(
            self.block, self.layout.groups, self.mixture, residuals=True, attention=attention
        )
        with observed as seen:
            hidden, _ = self.family.embed(self.model, ids)
            arguments = self.family.arguments(self.model, hidden)
            self.output = self.family.run_block(self.block, hidden, arguments)
        return seen

    def statistics(self, ids: Tensor, other: Tensor | None = None) -> BlockStatistics:
        """Collect in two batches, of ``other`` as the original stream."""
        collector = StatisticsCollector(self.layout, value=True, query_key=True, magnitudes=True)
        half = len(ids) // 2
        for part in (slice(half), slice(half, None)):
            original = None if other is None else self.observation(other[part])
            collector.add(self.observation(ids[part]), original)
        assert collector.experts is not None
        if collector.experts.scale(collector.tokens):
            for part in (slice(half), slice(half, None)):
                seen = self.observation(ids[part])
                collector.experts.see_all(self.block, seen.inputs[self.mixture.module])
        return collector.finish(self.family.norm_weights(self.block))

    def routes(self, seen: Observation) -> list[tuple[int, int, float]]:
        """Return token, expert and weight of each route, by the definition of the router."""
        X = seen.inputs[self.mixture.module].flatten(0, -2).double()
        router, config = self.block.get_submodule(self.mixture.router), self.model.config
        scales = torch.ones(self.mixture.count)
        if config.model_type == "gemma4_text":  # it reads the stream, behind a norm of its own
            stream = seen.residuals[self.mixture.module].flatten(0, 1).double()
            x = stream / (stream.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()
            logits = (x * router.scale * x.shape[1] ** -0.5) @ router.proj.weight.double().T
            scales = router.per_expert_scale
        else:
            logits = X @ next(router.parameters()).double().T
        found = []
        for token, row in enumerate(
            logits.sigmoid() if config.model_type in SIGMOIDS else logits.softmax(-1)
        ):
            best = self.best(row)
            normed = getattr(router, "norm_topk_prob", config.model_type != "deepseek_v2")
            total = sum(float(row[e]) for e in best) if normed else 1.0
            factor = getattr(config, "routed_scaling_factor", 1.0)
            found += [(token, e, factor * float(row[e] * scales[e]) / total) for e in best]
            if self.mixture.shared_gate is not None:
                logit = X[token] @ self.block.get_submodule(self.mixture.shared_gate).weight[0].double()
                found.append((token, self.mixture.count, float(logit.sigmoid())))
            elif self.mixture.shared is not None:
                found.append((token, self.mixture.count, 1.0))
        return found

    def best(self, scores: Tensor) -> list[int]:
        """Return the experts that a token's scores and the corrections choose, of the best group of them."""
        named = self.block.state_dict().items()
        corrections = [v.flatten() for name, v in named if name.endswith(("correction_bias", "expert_bias"))]
        corrected = scores + sum(corrections)
        if (groups := getattr(self.model.config, "n_group", None) or 1) > 1:
            parts = corrected.view(groups, -1)
            best = max(range(groups), key=lambda i: float(parts[i].sort(descending=True).values[:2].sum()))
            outside = [i for i in range(groups) if i != best]
            parts[outside] = -torch.inf
        order: list[int] = corrected.sort(descending=True).indices.tolist()
        return order[: self.mixture.chosen]

    def inner(self, expert: int, x: Tensor) -> Tensor:
        """Return the input of an expert's last matrix."""
        layers = [self.block.get_submodule(f"{self.experts[expert]}.{kind}_proj") for kind in ("gate", "up")]
        gate, up = (layer.weight.double() @ x + (0 if layer.bias is None else layer.bias) for layer in layers)
        config = self.model.config
        name = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "silu")
        return cast(Tensor, ACT2FN[name](gate) * up)


def weighted_mean(
    bench: Bench,
    seen: Observation,
    expert: int,
    of: Callable[[int], tuple[Tensor, Tensor]],
    factors: Tensor | None = None,
) -> tuple[Tensor, int]:
    """Return ``2 sum_t g_t^2 a_t b_t^T / sum_t g_t^2`` over an expert's tokens, and their number.

    Norms multiply a token's output by one of the ``factors``, and so its g.
    """
    total, weight, count = torch.zeros(()), 0.0, 0
    for token, number, share in bench.routes(seen):
        if number == expert:
            g = share if factors is None else share * float(factors[token])
            a, b = of(token)
            total = total + 2 * g**2 * torch.outer(a, b)
            weight, count = weight + g**2, count + 1
    return total / max(weight, 1e-30), count


def twice(of: Tensor, token: int) -> tuple[Tensor, Tensor]:
    return of[token], of[token]


@pytest.mark.parametrize(
    "name",
    [
        *("qwen3-moe", "qwen2-moe", "glm4-moe", "ernie4.5-moe", "hunyuan-moe", "lfm2-moe", "minimax"),
        *("glm4-flash", "deepseek-v2", "deepseek-v3", "granite4-moe", "granite-moe", "gemma4-moe"),
    ],
)
def test_hessians_are_of_the_tokens_that_are_routed_and_count_by_their_squared_weights(name: str) -> None:
    bench, ids = Bench(name), make_ids(40)
    found, seen = bench.statistics(ids), bench.observation(ids)
    X = seen.inputs[bench.mixture.module].flatten(0, -2).double()
    for expert in range(len(bench.experts)):
        hidden = "shared_expert" if expert == bench.mixture.count else f"expert_{expert}"
        names = (f"{bench.input} of expert {expert}", f"{hidden}_hidden")
        inner = torch.stack([bench.inner(expert, x) for x in X])
        for name, of in zip(names, (X, inner), strict=True):
            factors = None
            if of is inner and bench.mixture.norms:
                factors = bounded(seen.norms[bench.mixture.module][0], 1).flatten()
            H, count = weighted_mean(bench, seen, expert, partial(twice, of), factors)
            reached = found.reached[name]
            assert reached.tokens == count
            share = max(0.0, 1 - count / of.shape[1])
            assert reached.layer_share == pytest.approx(share)
            everything = 2 * of.T @ of / len(of)
            expected = (1 - share) * H + share * everything
            torch.testing.assert_close(found.inputs[name][:][0].double(), expected, **CLOSE)


def test_an_expert_that_no_token_reaches_has_the_hessian_of_all_tokens() -> None:
    bench, ids = Bench(), make_ids(6)
    direction = torch.randn(24)
    # for every token two of the first rows have a positive logit, which is more than the 0 of expert 3
    factors = torch.tensor([1.0, -1.0, 2.0, 0.0, -2.0, 0.0])
    bench.block.get_submodule(bench.mixture.router).weight.copy_(factors[:, None] * direction)
    seen, found = bench.observation(ids), bench.statistics(ids)
    assert found.reached["expert_3_hidden"] == Reached(0, 1.0)
    X = seen.inputs["mlp"].flatten(0, 1).double()
    inner = torch.stack([bench.inner(3, x) for x in X])
    for name, of in (("mlp_input of expert 3", X), ("expert_3_hidden", inner)):
        H = found.inputs[name][:][0].double()
        torch.testing.assert_close(H, 2 * of.T @ of / len(of), **CLOSE)


def test_shifts_are_of_the_routed_tokens_and_fade_where_they_are_few() -> None:
    bench, ids, other = Bench(), make_ids(40), make_ids(40)
    found = bench.statistics(ids, other)
    seen, original = bench.observation(ids), bench.observation(other)
    X, X_fp = (s.inputs["mlp"].flatten(0, 1).double() for s in (seen, original))
    assert found.shifts is not None
    for expert in range(bench.mixture.count):
        name = f"mlp_input of expert {expert}"
        S, count = weighted_mean(bench, seen, expert, lambda token: (X_fp[token] - X[token], X[token]))
        expected = min(1.0, count / X.shape[1]) * S
        torch.testing.assert_close(found.shifts.inputs[name].double(), expected, **CLOSE)
        assert found.shifts.outputs[f"expert_{expert}_hidden"].shape == (24, 12)


@pytest.mark.parametrize("name", ["qwen2-moe", "glm4-moe"])
def test_shared_and_routed_experts_make_up_for_the_shift_of_the_stream_together(name: str) -> None:
    bench, ids, other = Bench(name), make_ids(40), make_ids(40)
    found = bench.statistics(ids, other)
    seen, original = bench.observation(ids), bench.observation(other)
    Y, Y_fp = ((s.residuals["mlp"] + s.outputs["mlp"]) for s in (seen, original))
    pairs = zip(Y_fp.double(), Y.double(), strict=True)
    counts = torch.cat([massive.weights(*pair) for pair in pairs])
    X, shift = seen.inputs["mlp"].flatten(0, 1).double(), (Y_fp - Y).flatten(0, 1).double()
    routes = bench.routes(seen)
    shared = [g for _, expert, g in routes if expert == bench.mixture.count]
    totals = [max(1.0, sum(g for token, _, g in routes if token == t)) for t in range(len(X))]
    expected = sum(
        2 * counts[t] * g**2 * torch.outer(shift[t] / totals[t], bench.inner(bench.mixture.count, x))
        for t, (x, g) in enumerate(zip(X, shared, strict=True))
    ) / sum(g**2 for g in shared)
    assert found.shifts is not None
    assert max(totals) > 1.1
    torch.testing.assert_close(found.shifts.outputs["shared_expert_hidden"].double(), expected, **CLOSE)


@torch.no_grad()
def test_dense_network_and_experts_make_up_for_half_of_the_shift_each_behind_their_norms() -> None:
    """Norms multiply the output of either by the product of two factors of a token, and of two weights."""
    bench, ids, other = Bench("gemma4-moe"), make_ids(40), make_ids(40)
    bench.block.get_parameter("router.per_expert_scale").mul_(0.5)
    block, config, L = bench.block, bench.model.config, ids.shape[1]
    first, second, last = (
        block.get_parameter(f"post_feedforward_layernorm{i}.weight").double() for i in ("_1", "_2", "")
    )
    outputs: dict[str, Tensor] = {}
    for path in ("mlp", "experts"):
        block.get_submodule(path).register_forward_hook(
            lambda _, _inputs, output, path=path: outputs.update({path: output.flatten(0, -2).double()})
        )

    def inverse(y: Tensor) -> Tensor:
        return (y.square().mean(-1, keepdim=True) + float(config.rms_norm_eps)).rsqrt()

    def stream(seen: Observation) -> tuple[Tensor, Tensor, Tensor]:
        dense, routed = outputs["mlp"], outputs["experts"]
        both = first * inverse(dense) * dense + second * inverse(routed) * routed
        new = seen.residuals["experts"].flatten(0, 1) + last * inverse(both) * both
        of_either = [(inverse(y) * inverse(both)).view(-1, L) for y in (dense, routed)]
        bounded = [f.minimum(5 * f.median(1, keepdim=True).values).flatten() for f in of_either]
        return new, bounded[0], bounded[1]

    found = bench.statistics(ids, other)
    Y_fp, *_ = stream(bench.observation(other))
    seen = bench.observation(ids)
    Y, of_dense, of_experts = stream(seen)
    torch.testing.assert_close((Y * block.layer_scalar).float(), bench.output.flatten(0, 1))
    pairs = zip(Y_fp.view(-1, L, 24), Y.view(-1, L, 24), strict=True)
    counts, shift = torch.cat([massive.weights(*pair) for pair in pairs]), (Y_fp - Y) / 2

    def through(weight: Tensor) -> Tensor:
        return weight / (weight.square() + 0.01 * weight.square().mean())

    assert found.shifts is not None
    X = seen.inputs["mlp_hidden"].flatten(0, 1).double()
    expected = (counts * of_dense * (shift * through(first * last)).T) @ X / (counts @ of_dense**2)
    torch.testing.assert_close(found.shifts.outputs["mlp_hidden"].double(), 2 * expected, **CLOSE)
    H = X.T @ ((counts * of_dense**2)[:, None] * X) / (counts @ of_dense**2)
    torch.testing.assert_close(found.inputs["mlp_hidden"][:][0].double(), 2 * H, **CLOSE)

    routes, X = bench.routes(seen), seen.inputs["experts"].double()
    totals = [sum(g for token, _, g in routes if token == t) for t in range(len(X))]
    assert min(totals) < 0.9
    for expert in range(bench.mixture.count):
        total, weight, reached = torch.zeros(24, 12).double(), 0.0, 0
        for t, number, g in routes:
            if number == expert:
                aim = shift[t] * through(second * last) * g / totals[t]
                total += 2 * counts[t] * of_experts[t] * g * torch.outer(aim, bench.inner(expert, X[t]))
                weight, reached = weight + float(counts[t] * (of_experts[t] * g) ** 2), reached + 1
        expected = min(1, reached / 12) * total / weight
        name = f"expert_{expert}_hidden"
        torch.testing.assert_close(found.shifts.outputs[name].double(), expected, **CLOSE)


@pytest.mark.parametrize("name", ["qwen2-moe", "granite4-moe"])
def test_the_stream_is_seen_in_the_units_of_the_output_that_is_added(name: str) -> None:
    bench = Bench(name)
    seen, path = bench.observation(make_ids()), bench.mixture.module
    stream = seen.residuals[path] + seen.outputs[path]
    torch.testing.assert_close(stream * bench.mixture.residual_factor, bench.output)


def test_hessians_are_symmetric() -> None:
    found = Bench().statistics(make_ids(40))
    for hessian in found.inputs.values():
        H = hessian[:][0]
        assert torch.equal(H, H.T)
