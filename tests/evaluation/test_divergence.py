"""The divergence of two models is the one that their distributions have, position by position."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from aespa_pl.evaluation.perplexity import divergence, summary
from tests.models.examples import make_ids, make_model, save
from tests.models.test_streamed import open_stream


def distributions(model: PreTrainedModel, ids: Tensor) -> list[list[float]]:
    """Return the probabilities after each token but the last of each segment, by the softmax's formula."""
    found = []
    for segment in ids:
        logits = model(segment[None], use_cache=False).logits[0, :-1].double()
        for row in logits.tolist():
            odds = [math.exp(x - max(row)) for x in row]
            found.append([value / sum(odds) for value in odds])
    return found


@pytest.fixture
def models(tmp_path: Path) -> tuple[PreTrainedModel, PreTrainedModel, Path]:
    original = make_model("llama", torch.float32)
    other = make_model("llama", torch.float32)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))
    save(original, tmp_path / "original")
    save(other, tmp_path / "other")
    return original, other, tmp_path


def test_divergence_is_that_of_the_distributions(
    models: tuple[PreTrainedModel, PreTrainedModel, Path],
) -> None:
    original, other, folder = models
    ids = make_ids(3)
    sources = (open_stream(folder / "original"), open_stream(folder / "other"))
    (found,) = divergence(*sources, {"text": ids}, batch_size=2).values()
    with torch.no_grad():
        expected, got = distributions(original, ids), distributions(other, ids)
    kl = [
        sum(p * math.log(p / q) for p, q in zip(row, other_row, strict=True))
        for row, other_row in zip(expected, got, strict=True)
    ]
    same = [a.index(max(a)) == b.index(max(b)) for a, b in zip(expected, got, strict=True)]
    # float32 logits of two models
    assert found.mean == pytest.approx(sum(kl) / len(kl), rel=1e-3)
    assert found.rare == pytest.approx(max(kl), rel=1e-3)
    assert found.same_top == pytest.approx(sum(same) / len(same))
    assert 0 < found.same_top < 1


def test_a_model_does_not_diverge_from_itself(models: tuple[PreTrainedModel, PreTrainedModel, Path]) -> None:
    source = open_stream(models[2] / "original")
    again = open_stream(models[2] / "original")
    (found,) = divergence(source, again, {"text": make_ids(2)}, batch_size=2).values()
    assert (found.mean, found.rare, found.same_top) == (0, 0, 1)


def test_no_mean_divergence_is_below_zero() -> None:
    assert summary(torch.tensor([-1e-7, 0.0]), torch.ones(2)).mean == 0  # what float32 leaves of equal models
    assert math.isnan(summary(torch.tensor([math.nan, 0.0]), torch.ones(2)).mean)


def test_one_position_in_a_thousand_lies_above_the_quantile() -> None:
    values = torch.arange(1, 2001).float()[torch.randperm(2000)]
    assert summary(values, torch.ones(2000)).rare == 1998
