"""Tune a quantized model end to end: its next-token distribution becomes the original's.

All scales, norms and biases are trained on the Kullback-Leibler divergence, and with them, where the memory
suffices, latent values of the integers. Each latent value starts in the middle between the two places where
it would be rounded to another integer, so that only what many mini-batches agree on moves an integer.

Source: "EfficientQAT: Efficient Quantization-Aware Training for Large Language Models" (arXiv
2407.11062: E2E-QP, where the integers stay), with the original's distribution in place of the text's next
token; "LLM-QAT: Data-Free Quantization Aware Training for Large Language Models" (arXiv 2305.17888: the
distribution, with integers that are learned).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn.functional import kl_div
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint as recomputed

from aespa_pl.models.family import BlockLayout
from aespa_pl.tuning.block import changed_share
from aespa_pl.tuning.data import Pair, SegmentPairs
from aespa_pl.tuning.parametrization import (
    FixedIntegers,
    QuantizedWeight,
    Stored,
    StraightThrough,
    WeightParametrization,
)
from aespa_pl.tuning.training import LearningRates, Tuning, fit
from aespa_pl.tuning.weights import (
    MakeParametrization,
    parametrize_block,
    quantized_weights,
    remove_parametrizations,
)

OriginalHead = Callable[[Tensor], Tensor]
"""Makes the original model's logits ``[B, L, vocabulary]`` from its hidden states after the last block."""


class ModelTuning(Tuning):
    """Trains a causal-LM model on the divergence of its next-token distributions from the original's.

    A pair is the token ids ``[L]`` of a segment and the original's hidden states ``[L, d]`` after its
    last block: the original's logits are made from them, and of the original only the head is in memory.
    """

    def __init__(
        self, model: nn.Module, head: OriginalHead, rates: LearningRates, label: str
    ) -> None:
        """Take a model whose weights are parametrized; ``label`` names it in messages."""
        super().__init__(model, rates, label)
        self.head = head

    def error(self, batch: Pair) -> Tensor:
        """Return the divergence of all positions together, in nats, and their number."""
        ids, hidden = batch
        with torch.no_grad():
            wanted = self.head(hidden).float().log_softmax(-1)
        logits: Tensor = self.module(input_ids=ids, use_cache=False).logits
        divergence = kl_div(
            logits.float().log_softmax(-1), wanted, reduction="none", log_target=True
        )
        return torch.stack([divergence.sum(), divergence.new_tensor(ids.numel())])


@dataclass(frozen=True)
class TunableModel:
    """Holds a causal-LM model in float32 and evaluation mode, with what its blocks' weights stand for."""

    model: Any
    """Hugging Face model with dequantized weights."""
    blocks: Sequence[nn.Module]
    """Blocks of the model."""
    layout: BlockLayout
    weights: Sequence[Mapping[str, QuantizedWeight]]
    """Quantized weights by block and projection."""
    dtypes: Mapping[str, torch.dtype]
    """Types that the model's parameters are stored in, by their names in the model."""


@dataclass(frozen=True)
class TunedModel:
    """Holds what the end-to-end tuning found; norms and biases are in the model."""

    weights: list[dict[str, QuantizedWeight]]
    """Quantized weights by block and projection."""
    start_error: float
    """Divergence in nats on the segments that were held back."""
    error: float
    """The same for the epoch that is kept."""
    epoch: int
    """Epoch of the best error; 0 is the start."""
    finite: bool
    """Whether all errors were finite numbers; the training stopped where one was not."""
    changed: float
    """Share of the integers that changed."""


def tune_model(
    quantized: TunableModel,
    pairs: SegmentPairs,
    *,
    head: OriginalHead,
    rates: LearningRates,
    trainer: Trainer,
    checkpoint: Path | None = None,
    recompute: bool = False,
) -> TunedModel:
    """Tune the integers, scales, norms and biases of a model.

    Args:
        quantized: Its model gets the tuned weights, norms and biases.
        pairs: Token ids, and the original's hidden states after the last block.
        head: Head of the original, with weights of its own where the model's are tuned.
        rates: Largest learning rates; the integers stay where the latent values have the rate 0.
        trainer: Trainer with ``max_epochs``, and ``num_sanity_val_steps=-1``, which measures the start.
        checkpoint: Checkpoint of an earlier training that goes on.
        recompute: Keep only the inputs of blocks for the backward pass, and run each block once more in
            it: a third more time for the memory of one block's activations and weights.
    """
    _parametrize(quantized, _integers_learned if rates.latent else _integers_fixed)
    module = ModelTuning(quantized.model, head, rates, "the model")
    with _recomputing(quantized.blocks if recompute else ()):
        fit(module, pairs, trainer, checkpoint)
    weights = [quantized_weights(block, quantized.layout) for block in quantized.blocks]
    remove_parametrizations(quantized.model)
    return TunedModel(
        weights,
        module.start_error,
        module.best_error,
        module.best_epoch,
        module.finite,
        changed_share(_named(quantized.weights), _named(weights)),
    )


@contextmanager
def _recomputing(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Run blocks a second time in the backward pass; transformers' own way wants the training mode."""
    for block in blocks:
        block.forward = partial(recomputed, block.forward, use_reentrant=False)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def _integers_fixed(_: str, start: QuantizedWeight) -> WeightParametrization:
    return FixedIntegers(start)


def _integers_learned(_: str, start: QuantizedWeight) -> WeightParametrization:
    return StraightThrough(start, start.weight())  # all latent values begin at their integers


def _named(blocks: Sequence[Mapping[str, QuantizedWeight]]) -> dict[str, QuantizedWeight]:
    return {f"{i}.{name}": q for i, weights in enumerate(blocks) for name, q in weights.items()}


def _parametrize(quantized: TunableModel, make: MakeParametrization) -> None:
    model: nn.Module = quantized.model
    model.requires_grad_(requires_grad=False)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    inside = {id(p) for block in quantized.blocks for p in block.parameters()}
    outside = [(n, p) for n, p in model.named_parameters() if id(p) not in inside]
    for block, weights in zip(quantized.blocks, quantized.weights, strict=True):
        dtypes = {name: quantized.dtypes[names[id(p)]] for name, p in block.named_parameters()}
        parametrize_block(block, quantized.layout, weights, make, dtypes)
    for name, parameter in outside:
        if parameter.dim() > 1:
            continue  # embeddings and the head stay; vectors are norms and biases
        parameter.requires_grad_()
        path, _, kind = name.rpartition(".")
        if quantized.dtypes[name] != torch.float32:
            stored = Stored(quantized.dtypes[name])
            parametrize.register_parametrization(model.get_submodule(path), kind, stored)
