"""Train a model end to end whose blocks are read from disk whenever they run.

On the device are the learned numbers of all blocks (scales, norms, biases), one block and the activations
of one segment; the inputs of the blocks wait in host memory. Integers stay, or move on disk (``moving.py``).
The backward pass reads and runs every block once more, so larger mini-batches read less. While a block runs,
a thread reads the one that comes after it.

Source: "EfficientQAT: Efficient Quantization-Aware Training for Large Language Models" (arXiv 2407.11062),
E2E-QP: integers stay, scales are trained; "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174).
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from aespa_pl.measure import release_memory
from aespa_pl.models.family import Family
from aespa_pl.tuning.moving import Moves, latents
from aespa_pl.tuning.training import trained

Stored = dict[str, Tensor]
"""Tensors of a file, in memory."""


class TrainableStream(nn.Module):
    """Runs a model block by block; its parameters are the learned numbers of all blocks."""

    def __init__(
        self,
        model: Any,
        family: Family,
        read: Callable[[int], Stored],
        make: Callable[[int, Stored], nn.Module],
        moves: Moves | None = None,
    ) -> None:
        """Read each block once, in the state before the training.

        The model has its blocks on the meta device. What lies outside of them is loaded. A thread lets
        ``read`` tell what the block of a number has on disk, of which ``make`` makes it, parametrized. All
        that requires a gradient is learned, but without ``moves`` no latent values.
        """
        super().__init__()
        self._whole = (model, family)  # no submodule: what is on the meta device can't be moved
        self._read, self._make = read, make
        self._thread = ThreadPoolExecutor(1, "read-ahead")
        self._ahead: tuple[int, Future[tuple[Stored, Stored]]] | None = None
        self.moves = moves
        self.outside = _holder(trained(model))
        count = len(model.get_submodule(family.blocks_path))
        self.blocks = nn.ModuleList(self._learned(index) for index in range(count))

    def _learned(self, index: int) -> nn.Module:
        """Return a module that has the parameters of a block that are learned."""
        block = self._make(index, self._read(index))
        moving = {id(made.original) for made in latents(block).values()}
        learned = {name: p for name, p in trained(block).items() if id(p) not in moving}
        held = _holder({name: nn.Parameter(p.detach().clone()) for name, p in learned.items()})
        _empty(block)
        return held

    def forward(self, ids: Tensor) -> Tensor:
        """Return the hidden states ``[B, L, d]`` after the last block, of token ids ``[B, L]``."""
        model, family = self._whole
        hidden, arguments = family.embed(model, ids)
        # each segment runs alone, so a block's activations are those of one
        segment = family.arguments(model, hidden[:1]) if len(ids) > 1 else arguments
        for index, learned in enumerate(self.blocks):
            parameters = learned.parameters()
            hidden = _Block.apply(self, index, segment, hidden, *parameters)  # type: ignore[no-untyped-call]
        return hidden

    def run_block(self, block: nn.Module, hidden: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        """Run hidden states ``[B, L, d]`` through a block that is in memory."""
        return self._whole[1].run_block(block, hidden, arguments)

    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits ``[B, L, vocabulary]``."""
        return self._whole[1].head(self._whole[0], hidden)

    @contextmanager
    def block(self, index: int, towards: int = 1) -> Iterator[tuple[nn.Module, Stored]]:
        """Hold a block, with the numbers that it has learned, in memory for the time of this context.

        With it come the offsets of its integers, none where they haven't moved. Meanwhile the thread reads
        the block after it, or with ``towards`` -1 the one before it.
        """
        ahead, self._ahead, following = self._ahead, None, index + towards
        fetched = ahead[1].result() if ahead is not None and ahead[0] == index else self._fetched(index)
        if 0 <= following < len(self.blocks):
            self._ahead = following, self._thread.submit(self._fetched, following)
        stored, offsets = fetched
        block = self._make(index, stored)
        del ahead, fetched, stored
        for name, parameter in self.blocks[index].named_parameters():
            block.get_parameter(name).data = parameter.detach()
        if self.moves is not None:
            self.moves.apply(block, offsets)
        try:
            yield block, offsets
        finally:
            _empty(block)
            release_memory()  # some matrices come from the heap, whose free pieces do not fit all others

    def _fetched(self, index: int) -> tuple[Stored, Stored]:
        return self._read(index), {} if self.moves is None else self.moves.read(index)


def _empty(block: nn.Module) -> None:
    """Free a block's memory now: its modules refer to each other, so that they wait for the collector."""
    for tensor in chain(block.parameters(), block.buffers()):
        tensor.data = tensor.new_empty(0)


class _Block(torch.autograd.Function):
    """Runs a block that is in memory only for the time of a pass; its input waits in host memory."""

    @staticmethod
    def forward(
        ctx: Any, stream: TrainableStream, index: int, arguments: Mapping[str, Any], hidden: Tensor, *_: Any
    ) -> Tensor:
        ctx.stream, ctx.index, ctx.arguments, ctx.device = stream, index, arguments, hidden.device
        ctx.save_for_backward(hidden.cpu())
        with stream.block(index) as (block, _offsets):
            return torch.cat([stream.run_block(block, segment, arguments) for segment in hidden.split(1)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        segments, to_hidden, stream = ctx.saved_tensors[0].split(1), [], cast(TrainableStream, ctx.stream)
        names = [name for name, _ in stream.blocks[ctx.index].named_parameters()]
        with stream.block(ctx.index, towards=-1) as (block, offsets):
            moving = [made.original for made in latents(block).values()]
            learned = [*map(block.get_parameter, names), *moving]
            for segment, gradient in zip(segments, gradients[0].split(1), strict=True):
                own = segment.to(ctx.device).detach().requires_grad_()
                with torch.enable_grad():
                    output = stream.run_block(block, own, ctx.arguments)
                # adds up in .grad, so that the gradients of one segment are never there all at once
                torch.autograd.backward(output, gradient, inputs=[own, *learned])
                to_hidden.append(cast(Tensor, own.grad))
            to_learned = [torch.zeros_like(p) if p.grad is None else p.grad for p in learned]
            for parameter in learned:
                parameter.grad = None
            if stream.moves is not None:
                stream.moves.take_step(ctx.index, block, offsets, to_learned[len(names) :])
        return None, None, None, torch.cat(to_hidden), *to_learned[: len(names)]


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
