"""Train a model end to end whose blocks are read from disk whenever they run.

In memory are the learned numbers of all blocks (scales, norms, biases), one block, and the input of each
block for the mini-batch under way. The backward pass reads and runs every block once more.

Source: "EfficientQAT: Efficient Quantization-Aware Training for Large Language Models" (arXiv 2407.11062),
E2E-QP: integers stay, scales are trained; "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from aespa_pl.models.family import Family

OpenBlock = Callable[[int], nn.Module]
"""Reads the block of a number, parametrized; what requires a gradient is learned."""


class Logits(NamedTuple):
    """Holds what is used of a causal model's output."""

    logits: Tensor


class StreamedCausalLM(nn.Module):
    """Computes a model's logits, block by block; its parameters are the learned numbers of all blocks."""

    def __init__(self, model: Any, family: Family, blocks: int, read: OpenBlock) -> None:
        """Read each block once.

        Args:
            model: Model whose blocks are on the meta device; what lies outside of them is loaded, and what
                of it requires a gradient is learned too.
            family: Family of the model.
            blocks: Number of blocks.
            read: Reads a block in the state before the training.
        """
        super().__init__()
        self._whole = (model, family)  # no submodule: what is on the meta device can't be moved
        self._read = read
        self.outside = _holder(trained(model))
        self.blocks = nn.ModuleList(_holder(trained(read(index))) for index in range(blocks))

    def forward(self, input_ids: Tensor, **_: Any) -> Logits:
        """Return the logits ``[B, L, vocabulary]`` of token ids ``[B, L]``."""
        model, family = self._whole
        hidden, arguments = family.embed(model, input_ids)
        for index, learned in enumerate(self.blocks):
            run = partial(self._run, index, arguments)
            hidden = _Block.apply(run, hidden, *learned.parameters())  # type: ignore[no-untyped-call]
        return Logits(family.head(model, hidden))

    def block(self, index: int) -> nn.Module:
        """Return a block with the numbers that it has learned so far."""
        block, learned = self._read(index), self.blocks[index]
        for name, own in trained(block).items():
            own.data = learned.get_parameter(name).detach()
        return block

    def _run(
        self, index: int, arguments: Mapping[str, Any], hidden: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Return a block's output ``[B, L, d]``, and its parameters in the order of ``self.blocks``."""
        block = self.block(index)
        own: list[Tensor] = [
            block.get_parameter(name) for name, _ in self.blocks[index].named_parameters()
        ]
        return self._whole[1].run_block(block, hidden, arguments), own


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a module that require a gradient, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


class _Block(torch.autograd.Function):
    """Runs a block that is in memory only for the time of a pass."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[[Tensor], tuple[Tensor, list[Tensor]]], hidden: Tensor, *_: Tensor
    ) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(hidden)
        return run(hidden)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output, learned = ctx.run(hidden)
        return None, *torch.autograd.grad(output, [hidden, *learned], gradients)


def _holder(parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    """Return a module that has parameters under the names that they had in another."""
    root = nn.Module()
    for name, parameter in parameters.items():
        *path, last = name.split(".")
        owner = root
        for part in path:
            if part not in dict(owner.named_children()):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(last, parameter)
    return root
