"""Reconstruction of a block: what it learns, keeps, stores and continues."""

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from aespa_pl.algorithm.objectives import OF_TORCH, Precision
from aespa_pl.models.weights import projection_weight
from aespa_pl.tuning.data import Pair
from aespa_pl.tuning.losses import Loss, RunBlock, output_error
from aespa_pl.tuning.training import LearningRates
from aespa_pl.tuning.tune import Tuned
from aespa_pl.tuning.weights import EVERYTHING, Recipe
from tests import massive
from tests.tuning.tuned import RATES, Example, quantize, tune_block

ANNEALED = replace(EVERYTHING, anneals=True)


def held_back_error(example: Example) -> float:
    """Return the error of the last two of the ten segments, in float64."""
    with torch.no_grad():
        found = example.run_block(example.quantized.block, torch.cat(example.inputs)[8:])
    shares: list[float] = []
    for segment, targets in zip(found, torch.cat(example.targets)[8:], strict=True):
        sizes = massive.divisors(targets, segment)
        for error, size in zip((segment - targets).tolist(), sizes, strict=True):
            shares.append(massive.power(error) / size)
    return sum(shares) / len(shares)


def state(example: Example, result: Tuned) -> dict[str, Tensor]:
    kinds = ("integers", "scale", "zero_point")
    weights = {f"{n}.{k}": getattr(q, k) for n, q in result.weights[0].items() for k in kinds}
    return {**example.quantized.block.state_dict(), **weights}


def test_steps_do_not_depend_on_the_size_of_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in wide models, and where a block adds little to large hidden states."""
    torch.manual_seed(0)
    expected = tune_block(Example.make(), 8)

    def small(run_block: RunBlock) -> Loss:
        return lambda block, batch: output_error(run_block)(block, batch) * torch.tensor([2.0**-20, 1.0])

    monkeypatch.setattr("tests.tuning.tuned.output_error", small)
    torch.manual_seed(0)
    found = tune_block(Example.make(), 8)
    assert found.error == pytest.approx(expected.error * 2.0**-20, rel=1e-3)
    assert found.changed == pytest.approx(expected.changed, rel=1e-2)


@pytest.mark.parametrize("products", ["float32", "bfloat16"])
def test_steps_multiply_in_the_precision_of_products_and_errors_in_float32(
    products: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set[tuple[str, str]]()

    def see(what: str) -> None:
        seen.add((what, torch.get_float32_matmul_precision()))

    def watched(run_block: RunBlock) -> Loss:
        def loss(block: nn.Module, batch: Pair) -> Tensor:
            found = output_error(run_block)(block, batch)
            see("step" if found.requires_grad else "error")
            if found.requires_grad:
                found.register_hook(lambda _: see("gradient"))
            return found

        return loss

    monkeypatch.setattr("tests.tuning.tuned.output_error", watched)
    tune_block(Example.make(), 2, products=products)
    of_steps = OF_TORCH[products]
    assert seen == {("step", of_steps), ("gradient", of_steps), ("error", "highest")}
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(
    ("name", "groups", "learned"),
    [
        ("llama-grouped", 1, EVERYTHING),
        ("opt", 1, EVERYTHING),
        ("opt-bare", 2, EVERYTHING),
        ("bloom", 1, EVERYTHING),
        ("bloom", 2, EVERYTHING),
        ("qwen3", 2, EVERYTHING),
        ("llama-grouped", 2, ANNEALED),
    ],
)
def test_the_block_that_is_left_is_what_was_evaluated_and_can_be_stored(
    name: str, groups: int, learned: Recipe
) -> None:
    example = Example.make(name, groups=groups)
    before = held_back_error(example)
    result = tune_block(example, 8, recipe=learned)
    assert result.start_error == pytest.approx(before, rel=1e-4)
    assert result.error == pytest.approx(held_back_error(example), rel=1e-4)
    assert result.error < before
    assert result.changed > 0
    assert result.finite
    for p in example.layout.projections:
        q = result.weights[0][p.name]
        step, zero = (x.repeat_interleave(q.integers.shape[1] // groups, 1) for x in (q.scale, q.zero_point))
        found = projection_weight(example.quantized.block, example.layout, p)
        assert torch.equal(found, step * (q.integers.float() - zero))
        assert torch.equal(q.scale, q.scale.half().float())
        assert int(q.integers.max()) <= 3
    names = {n for n, _ in example.quantized.block.named_parameters()}
    assert names == set(example.quantized.dtypes)
    for parameter in example.quantized.block.parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, parameter.half().float())


def test_norms_and_biases_are_learned_too() -> None:
    example = Example.make("opt")
    before = {n: p.clone() for n, p in example.quantized.block.named_parameters() if p.dim() == 1}
    tune_block(example, 4)
    after = dict(example.quantized.block.named_parameters())
    # what is added to all keys alike changes no attention
    assert [n for n, p in before.items() if torch.equal(p, after[n])] in ([], ["self_attn.k_proj.bias"])


def test_a_block_at_its_target_stays_where_it_is() -> None:
    example = Example.make("llama-grouped", bits=8)
    block = example.quantized.block
    example.targets = [example.run_block(block, hidden) for hidden in example.inputs]
    before = copy.deepcopy(block.state_dict())
    result = tune_block(example, 1)
    assert result.start_error == 0
    assert result.error == 0
    assert result.epoch == 0
    assert result.changed == 0
    for name, tensor in block.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_the_best_epoch_is_kept_and_the_start_is_one_of_them() -> None:
    wild = Example.make(bits=4)
    start, before = held_back_error(wild), copy.deepcopy(wild.quantized.block.state_dict())
    result = tune_block(wild, 4, rates=type(RATES)(30.0, 5.0, 5.0))
    assert result.epoch == 0
    assert result.error == result.start_error == pytest.approx(start, rel=1e-4)
    for name, tensor in wild.quantized.block.state_dict().items():
        assert torch.equal(tensor, before[name])


class PoisonOnce(Callback):
    """Makes a parameter NaN in the second epoch, which must be the last."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        assert trainer.current_epoch <= 1
        if trainer.current_epoch == 1:
            next(pl_module.parameters()).data.fill_(math.nan)


def test_an_error_that_is_not_finite_ends_the_training_and_keeps_the_best() -> None:
    example = Example.make()
    result = tune_block(example, 6, callbacks=[PoisonOnce()])
    assert not result.finite
    assert result.epoch <= 1
    assert math.isfinite(result.error)
    assert held_back_error(example) == pytest.approx(result.error, rel=1e-4)


class KilledError(Exception):
    pass


class SaveAndDie(Callback):
    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path, weights_only=False)
            raise KilledError


@pytest.mark.parametrize("steps", [1, 10])  # a warm-up of one step had no length to divide by
def test_any_number_of_steps_can_be_taken(steps: int) -> None:
    result = tune_block(Example.make(), 4, max_steps=steps)
    assert result.finite
    assert result.error <= result.start_error


@pytest.mark.parametrize(
    ("kills", "learned"),
    [
        ([1], EVERYTHING),
        ([6], EVERYTHING),
        ([16], EVERYTHING),
        ([4, 8, 10], EVERYTHING),
        ([8, 9, 15], EVERYTHING),
        ([6, 13], ANNEALED),
    ],
)
def test_a_training_that_was_killed_goes_on_bit_for_bit(
    kills: list[int], learned: Recipe, tmp_path: Path
) -> None:
    """4 steps are an epoch; after 16 the end."""
    torch.manual_seed(3)
    example = Example.make()
    whole = copy.deepcopy(example)
    rates = LearningRates(0.01, 0.02, 0.02) if learned.anneals else RATES  # the best epoch comes late
    checkpoint = None
    for step in kills:
        file = tmp_path / f"{step}.ckpt"
        dies = [SaveAndDie(step, file)]
        with pytest.raises(KilledError):
            tune_block(
                copy.deepcopy(example), 4, rates=rates, recipe=learned, checkpoint=checkpoint, callbacks=dies
            )
        torch.load(file, weights_only=True)  # holds no objects
        checkpoint = file
    results = []
    for made, start in ((whole, None), (example, checkpoint)):
        result = tune_block(made, 4, rates=rates, recipe=learned, checkpoint=start)
        results.append((result, state(made, result)))
    (wanted, expected), (resumed, found) = results
    assert (wanted.start_error, wanted.error, wanted.epoch) == (
        resumed.start_error, resumed.error, resumed.epoch,
    )  # fmt: skip
    assert wanted.epoch > 1
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_weights_of_more_bits_learn_in_proportion_to_the_distance_of_integers() -> None:
    example = Example.make(bits=2)
    finer = quantize(example.quantized.targets["down_proj"], 4)
    weights = {**example.quantized.weights, "down_proj": finer}
    example.quantized = replace(example.quantized, weights=weights, targets=None)
    rates: dict[str, float] = {}

    class Watch(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            names = {id(p): name for name, p in pl_module.module.named_parameters()}
            for group in trainer.optimizers[0].param_groups:
                rates.update({names[id(p)]: group["max_lr"] for p in group["params"]})

    tune_block(example, 1, rates=LearningRates(0.01, 0.005, 0.003, bits=2), callbacks=[Watch()])
    assert rates["mlp.down_proj.parametrizations.weight.original"] == pytest.approx(0.01 * 3 / 15)
    assert rates["mlp.up_proj.parametrizations.weight.original"] == 0.01
    assert rates["mlp.down_proj.parametrizations.weight.0.log_scale"] == 0.005
    tune_block(example, 1, rates=LearningRates(0.01, 0.005, 0.003), callbacks=[Watch()])
    assert rates["mlp.down_proj.parametrizations.weight.original"] == 0.01
