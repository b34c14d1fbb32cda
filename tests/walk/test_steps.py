"""Each step of a walk computes what it promises: nearest rounding, OPTQ, correction, learning, polish."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from tests.reference import optq_row
from tests.walk.by_hand import (
    CORRECT,
    FAMILIES,
    NEAREST,
    NOT_LEARNED,
    OFF,
    POLISH,
    Walked,
    check_export,
    damped_hessian,
    differing,
    every_family,
    inputs_of_block,
    nearest,
    weight,
    without_dead,
)
from tests.walks import BLOCKS, walk


@every_family
def test_losses_are_those_of_the_model_on_disk(name: str, walked: Walked) -> None:
    """Unfold the exported weights, and measure them on what the quantized blocks before them give."""
    quantized = walked(name, {"objective.value": "layer", "objective.query_key": "layer"})
    exported = quantized.exported()
    for index in range(BLOCKS):
        inputs = inputs_of_block(quantized, index)
        for p in quantized.layout.projections:
            X = inputs[quantized.group(p).name]
            unfolded = weight(exported, quantized, index, p) / quantized.row_factor(index, p)
            W = without_dead(weight(quantized.original, quantized, index, p), X)
            error = unfolded.double() * quantized.zeta(index, p) - W
            expected = float((error @ damped_hessian(X) * error).sum())
            # float32 hidden states through up to three blocks
            assert quantized.losses(index)[p.name]["final"] == pytest.approx(expected, rel=1e-3)


@every_family
def test_learned_rounding_is_never_worse_than_optqs(name: str, walked: Walked) -> None:
    quantized, better = walked(name), 0
    for index in range(BLOCKS):
        losses = quantized.losses(index)
        assert losses.keys() == {p.name for p in quantized.layout.projections}
        for loss in losses.values():
            assert loss["final"] <= loss["optq"] * (1 + 1e-6)  # float32 sums
            better += loss["final"] < 0.999 * loss["optq"]
    assert better > BLOCKS


def test_keep_best_takes_the_better_of_learned_and_optq(walked: Walked) -> None:
    rough = {"rounding.learning_rate": 3.0, "rounding.penalty_other": 50.0}
    learned = walked("opt", {**rough, "rounding.keep_best": False}).losses(0)
    best = walked("opt", rough).losses(0)
    worse = better = 0
    for name, loss in best.items():
        assert loss["final"] <= min(loss["optq"], learned[name]["final"]) * (1 + 1e-6)
        assert learned[name]["optq"] == loss["optq"]
        worse += learned[name]["final"] > loss["optq"]
        better += loss["final"] < 0.999 * loss["optq"]
    assert worse  # else there was nothing to choose
    assert better


@every_family
def test_correction_aims_at_the_output_of_the_original_model(name: str, walked: Walked) -> None:
    """The first projections of block 1 are corrected by least squares on their inputs in both models.

    Block 0 has nothing to make up for. With nearest rounding on the grid that was found, the
    integers of the second tell what their target was.
    """
    off, on = walked(name, NEAREST), walked(name, {**NEAREST, **CORRECT})
    assert differing(off, on) == set()
    assert differing(off, on, 1)
    group = on.layout.groups[0]
    X, original = (inputs_of_block(on, 1, original=kind)[group.name] for kind in (False, True))
    H = damped_hessian(X)
    shift = (original - X).T @ X * 2 / X.shape[0]
    tensors = on.file(1)
    for p in group.projections:
        W = weight(on.original, on, 1, p).double()
        target = W + 0.5 * W @ shift @ torch.linalg.inv(H)
        integers = nearest(on, 1, p, without_dead(target, X))
        assert float((integers == tensors[f"{p.name}.integers"]).double().mean()) > 0.99
        assert not torch.equal(nearest(on, 1, p, W), integers)


class Precisions(Callback):
    """Remembers what the learning of each block multiplies in."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen.append(str(pl_module.precision))


def test_coarse_products_find_nearly_the_same(walked: Walked, tmp_path: Path) -> None:
    products = "bfloat16"
    rough = {"rounding.keep_best": False, "polish.enabled": False}
    exact = walked("opt", rough)
    precisions = Precisions()
    coarse = walk(
        "opt", tmp_path, {**rough, "products": products}, options=lambda *_: {"callbacks": [precisions]}
    )
    assert precisions.seen == [products] * BLOCKS
    losses = [(coarse.losses(0)[name], loss) for name, loss in exact.losses(0).items()]
    for found, loss in losses:
        assert found["optq"] == loss["optq"]  # statistics are in tf32, which is float32 on a CPU
        assert found["final"] == pytest.approx(loss["final"], rel=0.2)
    assert any(found["final"] != loss["final"] for found, loss in losses)


@pytest.mark.parametrize(
    ("name", "others"),
    [*((name, {}) for name in FAMILIES), ("opt", NOT_LEARNED), ("llama-grouped", {"group_size": 4})],
)
def test_polish_lowers_the_losses_and_never_raises_one(
    name: str, others: dict[str, Any], walked: Walked
) -> None:
    """Block 0 is the same with and without; block 1 sees the other hidden states."""
    off, on = walked(name, others), walked(name, {**others, **POLISH})
    check_export(on, bits=2)
    before = off.losses(0)
    changed = 0.0
    for index in range(BLOCKS):
        for projection, loss in on.losses(index).items():
            if index == 0:
                assert loss["before_polish"] == before[projection]["final"]
                assert loss["optq"] == before[projection]["optq"]
            assert loss["final"] <= loss["before_polish"]
            assert 1 <= loss["polish_passes"] <= 10
            if loss["polish_changed"]:
                assert loss["final"] < loss["before_polish"]
                assert loss["polish_passes"] > 1
        changed += sum(loss["polish_changed"] for loss in on.losses(index).values())
        total = {k: sum(x[k] for x in on.losses(index).values()) for k in ("before_polish", "final")}
        assert total["final"] < 0.97 * total["before_polish"]
    for projection in (p.name for p in on.layout.projections):
        one, two = (walk.file(0)[f"{projection}.integers"] for walk in (off, on))
        assert int((one != two).sum()) == on.losses(0)[projection]["polish_changed"]


@every_family
def test_without_optq_and_learning_the_integers_are_the_nearest(name: str, walked: Walked) -> None:
    quantized = walked(name, NEAREST)
    for index in range(BLOCKS):
        tensors, inputs = quantized.file(index), inputs_of_block(quantized, index)
        for p in quantized.layout.projections:
            X = inputs[quantized.group(p).name]
            W = without_dead(weight(quantized.original, quantized, index, p), X)
            expected = nearest(quantized, index, p, W)
            assert torch.equal(expected, tensors[f"{p.name}.integers"].double())
            loss = quantized.losses(index)[p.name]
            assert loss["nearest"] == loss["optq"] == loss["final"]


def test_without_learning_the_integers_are_optqs(walked: Walked) -> None:
    quantized = walked("opt", {**OFF, **NOT_LEARNED})
    inputs, tensors = inputs_of_block(quantized, 0), quantized.file(0)
    for p in quantized.layout.projections:
        if p.role != "other":
            continue
        X = inputs[quantized.group(p).name]
        H, W = damped_hessian(X), without_dead(weight(quantized.original, quantized, 0, p), X)
        for i in range(W.shape[0]):
            step = tensors[f"{p.name}.scale"][i].double().expand(W.shape[1])
            zero = tensors[f"{p.name}.zero_point"][i].double().expand(W.shape[1])
            _, integers = optq_row(W[i], H, step, zero, largest=3)
            assert torch.equal(integers, tensors[f"{p.name}.integers"][i].double())
    for loss in quantized.losses(0).values():
        assert loss["final"] == loss["optq"] != loss["nearest"]
