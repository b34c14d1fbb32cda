"""End-to-end tuning: the divergence is the textbook's, integers move or stay, a kill changes nothing."""

import copy
from pathlib import Path
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
from tests.tuning.test_block import KilledError, SaveAndDie
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

    def tune(
        self,
        epochs: int = 3,
        checkpoint: Path | None = None,
        *,
        recompute: bool = False,
        integer_rate: float = 0.0,
        **options: Any,
    ) -> Tuned:
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
            trainer=silent_trainer(epochs, **options),
            recipe=EVERYTHING if integer_rate else SCALES,
            checkpoint=checkpoint,
            model=self.model,
            outside={n: torch.float16 for n in vectors if not n.startswith(inside)},
            recompute=recompute,
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


@pytest.mark.parametrize(("step", "rate"), [(2, 0), (4, 0), (5, 0), (28, 0.06), (29, 0.06)])
def test_a_tuning_that_was_killed_goes_on_bit_for_bit(  # 4 steps are an epoch
    step: int, rate: float, tmp_path: Path
) -> None:
    whole, epochs = Problem("llama-grouped"), 8 if rate else 3
    killed, resumed = copy.deepcopy(whole), copy.deepcopy(whole)
    expected = whole.tune(epochs, integer_rate=rate)
    with pytest.raises(KilledError):
        killed.tune(epochs, integer_rate=rate, callbacks=[SaveAndDie(step, tmp_path / "x.ckpt")])
    stored = torch.load(tmp_path / "x.ckpt", weights_only=True)["state_dict"]
    assert not any("embed" in name for name in stored)
    learned = {name for name, tensor in stored.items() if tensor.dim() > 1}
    kinds = ("log_scale", "weight.original") if rate else ("log_scale",)
    assert all(name.endswith(kinds) for name in learned)
    found = resumed.tune(epochs, integer_rate=rate, checkpoint=tmp_path / "x.ckpt")
    assert (found.start_error, found.error, found.epoch) == (
        expected.start_error, expected.error, expected.epoch,
    )  # fmt: skip
    assert expected.epoch > 1
    for key, tensor in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[key], tensor)
