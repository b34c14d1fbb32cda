"""End-to-end tuning: the divergence is the textbook's, integers move or stay."""

import copy
from typing import Any

import pytest
import torch

from aespa_pl.models import family_of
from aespa_pl.models.weights import projection_weight, set_projection_weight
from aespa_pl.tuning.data import SegmentPairs
from aespa_pl.tuning.losses import divergence
from aespa_pl.tuning.training import LearningRates
from aespa_pl.tuning.tune import Tuned, tune
from aespa_pl.tuning.weights import EVERYTHING, SCALES, TunableBlock
from tests.models.examples import make_ids, make_model
from tests.tuning.tuned import HELD_BACK, SEGMENTS, quantize, silent_trainer


class Problem:
    """A quantized model and its original."""

    def __init__(self, name: str) -> None:
        self.original: Any = make_model(name, torch.float32)
        self.family = family_of(self.original.config)
        self.model: Any = copy.deepcopy(self.original)
        layout = self.family.layout(self.model.config)
        blocks = list(self.model.get_submodule(self.family.blocks_path))
        weights = []
        for block in blocks:
            found = {}
            for p in layout.projections:
                found[p.name] = quantize(projection_weight(block, layout, p), bits=2)
                set_projection_weight(block, layout, p, found[p.name].weight())
            weights.append(found)
        types = [{n: torch.float16 for n, _ in block.named_parameters()} for block in blocks]
        for parameter in self.model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(parameter.half())
        self.layout = layout
        self.blocks = [
            TunableBlock(block, layout, start, dtypes)
            for block, start, dtypes in zip(blocks, weights, types, strict=True)
        ]
        self.ids = make_ids(SEGMENTS)

    def tune(self, epochs: int = 3, *, integer_rate: float = 0.0) -> Tuned:
        hidden = self.family.embed(self.original, self.ids)[0]
        for block in self.original.get_submodule(self.family.blocks_path):
            hidden = self.family.run_block(block, hidden, self.family.arguments(self.original, hidden))
        pairs = SegmentPairs([self.ids], [hidden], batch_size=2, held_back=HELD_BACK, seed=1)
        inside = f"{self.family.blocks_path}."
        vectors = [n for n, p in self.model.named_parameters() if p.dim() == 1]
        return tune(
            self.blocks,
            pairs,
            loss=divergence(lambda states: self.family.head(self.original, states)),
            rates=LearningRates(integer_rate, 0.02, 0.02),
            trainer=silent_trainer(epochs),
            recipe=EVERYTHING if integer_rate else SCALES,
            model=self.model,
            outside={n: torch.float16 for n in vectors if not n.startswith(inside)},
        )

    def divergence(self) -> float:
        """Return the mean divergence on the last two of the ten segments, in float64."""
        with torch.no_grad():
            p, q = (m(self.ids[8:]).logits.double().softmax(-1) for m in (self.original, self.model))
        return float((p * (p / q).log()).sum(-1).mean())


@pytest.mark.parametrize("name", ["llama-grouped", "opt-350m", "bloom"])
def test_scales_and_norms_are_learned_and_integers_stay(name: str) -> None:
    problem = Problem(name)
    start, before = problem.divergence(), copy.deepcopy(problem.model.state_dict())
    result = problem.tune()
    assert result.start_error == pytest.approx(start, rel=1e-3)
    assert result.error == pytest.approx(problem.divergence(), rel=1e-3)
    assert result.error < start
    after = problem.model.state_dict()
    assert set(after) == set(before)
    layout = problem.layout
    inside = f"{problem.family.blocks_path}."
    for tunable, new in zip(problem.blocks, result.weights, strict=True):
        block, old = tunable.block, tunable.weights
        for p in layout.projections:
            assert torch.equal(new[p.name].integers, old[p.name].integers)
            assert torch.equal(new[p.name].scale, new[p.name].scale.half().float())
            found = projection_weight(block, layout, p)
            steps = old[p.name].integers.float() - old[p.name].zero_point
            assert torch.equal(found, new[p.name].scale * steps)
    for key, tensor in before.items():
        if tensor.dim() > 1 and not key.startswith(inside):
            assert torch.equal(after[key], tensor)  # embeddings, head
    norms = [k for k, t in before.items() if t.dim() == 1 and not k.startswith(inside)]
    assert all(not torch.equal(after[k], before[k]) for k in norms)
    assert result.changed == 0


@pytest.mark.parametrize("name", ["llama-grouped", "opt-350m", "bloom"])
def test_integers_are_learned_with_the_rest(name: str) -> None:
    problem = Problem(name)
    start, result = problem.divergence(), problem.tune(8, integer_rate=0.06)
    assert result.error == pytest.approx(problem.divergence(), rel=1e-3)
    assert result.error < start
    pairs = [
        (b.weights[p.name], new[p.name], projection_weight(b.block, problem.layout, p))
        for b, new in zip(problem.blocks, result.weights, strict=True)
        for p in problem.layout.projections
    ]
    changed = sum(int((old.integers != new.integers).sum()) for old, new, _ in pairs)
    assert 0 < changed == pytest.approx(result.changed * sum(old.integers.numel() for old, _, _ in pairs))
    for old, new, weight in pairs:
        assert int(new.integers.max()) <= 3
        assert torch.equal(weight, new.scale * (new.integers - old.zero_point))
