"""What each recipe leaves in the block is what was evaluated, whichever epoch is the best."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from aespa_pl.models.weights import projection_weight
from aespa_pl.resolve import resolved
from aespa_pl.settings import QuantizationSettings
from aespa_pl.tuning.omniquant import HeadMatrices
from aespa_pl.tuning.training import LearningRates
from aespa_pl.tuning.weights import recipe
from tests.tuning.test_block import held_back_error
from tests.tuning.tuned import Example, tune_block
from tests.walks import changed

RATES = LearningRates(0.1, 0.3, 0.1, 0.05)


class Spoil(Callback):
    """Makes the last epoch a bad one, and notes how wide the bands of matrices are."""

    def __init__(self) -> None:
        self.widths: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        matrices = [m for m in pl_module.module.modules() if isinstance(m, HeadMatrices)]
        self.widths += [matrices[0].width / len(matrices[0].distance)] if matrices else []
        if trainer.current_epoch == 3 and trainer.is_last_batch:
            for parameter in pl_module.parameters():
                if parameter.requires_grad:
                    parameter.data.mul_(-3)


@pytest.mark.parametrize("name", ["llama-grouped", "bloom"])
@pytest.mark.parametrize("method", ["brecq", "omniquant", "affinequant"])
def test_the_block_that_is_left_is_what_was_evaluated(method: str, name: str) -> None:
    example = Example.make(name, bits=3, groups=2)
    block, layout = example.quantized.block, example.layout
    settings = resolved(changed({"tuning.blocks.epochs": 4}, QuantizationSettings(method=method)))
    spoil = Spoil()
    learned = recipe(settings, block, layout)
    result = tune_block(example, 4, rates=RATES, recipe=learned, callbacks=[spoil])
    assert result.epoch < 4
    assert result.error == pytest.approx(held_back_error(example), rel=1e-4)
    for p in layout.projections:
        found = result.weights[0][p.name]
        assert torch.equal(projection_weight(block, layout, p), found.weight())
        assert found.scale.shape[1] == 2
    assert set(dict(block.named_parameters())) == set(example.quantized.dtypes)
    steps = len(spoil.widths) // 4
    expected = [(epoch + 1) / 4 for epoch in range(4) for _ in range(steps)]
    assert spoil.widths == (expected if method == "affinequant" else [])
