"""Sums over batches, collectors and precisions are those over all segments at once."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from aespa_pl.calibration.collector import StatisticsCollector
from aespa_pl.models.kept import layout_of
from aespa_pl.settings import QuantizationSettings
from tests.calibration.collected import (
    LENGTH,
    MODELS,
    SEGMENTS,
    WIDTH,
    assert_close,
    collect,
    first_block,
    llama,
    make,
    run_through,
    shared_by_all,
    tokens,
    whole,
)


@pytest.mark.parametrize("model_of", MODELS)
def test_batches_of_one_and_of_eight_agree(model_of: Callable[[], PreTrainedModel]) -> None:
    model, ids = make(model_of), tokens()
    single, _, _ = collect(model, ids, 1)
    together, _, _ = collect(model, ids, 8)
    assert_close(single, together)


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


def test_an_input_of_kept_projections_has_no_statistics() -> None:
    model = make(llama)
    family, _, _ = first_block(model)
    kept = QuantizationSettings(bits_of={"down_proj": 16, "q_proj": 16})
    collector = StatisticsCollector(layout_of(family, model.config, kept, 0), value=True, query_key=True)
    collector.add(run_through(model, tokens()))
    assert set(collector.finish().inputs) == {"attention_input", "attention_output", "mlp_input"}


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
        found |= {"keys": statistics.g_query, "queries": statistics.g_key}
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
