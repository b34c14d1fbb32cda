"""Measure how far a quantized block or model is from the original, on a mini-batch.

A block's output on quantized inputs shall become the original's: the inputs are the hidden states that the
quantized and tuned blocks before it make, the target is the original block's output on the original model's
hidden states. A model's next-token distributions shall become the original's.

Source: "BRECQ: Pushing the Limit of Post-Training Quantization by Block Reconstruction" (arXiv 2102.05426);
"LLM-QAT: Data-Free Quantization Aware Training for Large Language Models" (arXiv 2305.17888: the
distribution).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div
from torch.utils.checkpoint import checkpoint

from aespa_pl.algorithm.massive import error_divisors
from aespa_pl.tuning.data import Pair

Loss = Callable[[nn.Module, Pair], Tensor]
"""Returns ``[2]``: the errors of all positions of a mini-batch added up, and their number."""
RunBlock = Callable[[nn.Module, Tensor], Tensor]
"""Runs a batch of a stream ``[B, L, w]`` through a block, with autograd."""


def output_error(run_block: RunBlock, width: int | None = None) -> Loss:
    """Return a block's loss: the mean squared error of each token, divided by ``error_divisors``.

    A pair is the stream before the block and the one that it should make, ``[L, w]`` each, of which the first
    ``width`` columns are compared; None: all.
    """

    def loss(block: nn.Module, batch: Pair) -> Tensor:
        inputs, target = batch[0], batch[1][..., :width].float()  # [B, L, d]
        output = run_block(block, inputs)[..., :width].float()
        errors = (output - target).square().mean(-1) / error_divisors(target, output)  # [B, L]
        return torch.stack([errors.sum(), errors.new_tensor(errors.numel())])

    return loss


def divergence(head: Callable[[Tensor], Tensor], *, one_by_one: bool = False) -> Loss:
    """Return a model's loss: the Kullback-Leibler divergence from the original at each position, in nats.

    A pair is the token ids ``[L]`` of a segment and the original's hidden states ``[L, d]`` after its last
    block. Its ``head`` makes its logits from them, so that nothing else of it is in memory. With
    ``one_by_one`` the model is a ``TrainableStream``: logits of one segment at a time are in memory, and are
    computed once more in the backward pass.
    """

    def summed(logits: Tensor, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = head(hidden).float().log_softmax(-1)
        found = logits.float().log_softmax(-1)
        return kl_div(found, wanted, reduction="none", log_target=True).sum()

    def loss(model: Any, batch: Pair) -> Tensor:
        ids, hidden = batch
        if one_by_one:

            def of_segment(last: Tensor, states: Tensor) -> Tensor:
                return summed(model.head(last[None]), states[None])

            of_each = partial(checkpoint, of_segment, use_reentrant=False)
            total = torch.stack(list(map(of_each, model(ids), hidden))).sum()
        else:
            total = summed(model(input_ids=ids, use_cache=False).logits, hidden)
        return torch.stack([total, total.new_tensor(ids.numel())])

    return loss
