"""Watch what a block does with one batch, as its modules see it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from aespa_pl.models.family import InputGroup, Projection
from aespa_pl.models.observed import Attention
from aespa_pl.models.parts import ExpertMixture

ObserveAttention = Callable[[Callable[[Attention], None]], AbstractContextManager[None]]
"""Opens a context in which its argument is called with what the block's attention does."""


@dataclass
class Observation:
    """Holds the tensors of one batch on its way through a block."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    """``X [B, L, d_in]`` by the input's name; an expert's has the tokens that are routed to it. The whole
    mixture of experts is here, and below, by the path of its module."""
    residuals: dict[str, Tensor] = field(default_factory=dict)
    """The residual stream ``[B, L, d]`` that an output is added to, by the input's name.

    It is divided by what the output is multiplied by, so that the two add up to the new stream in the units
    of the output."""
    outputs: dict[str, Tensor] = field(default_factory=dict)
    """Output ``[B, L, d]`` that is added to the residual stream without a norm between, by the input's
    name."""
    attention: Attention | None = None
    """Queries and keys of the attention; None where they were not asked for."""
    routing: tuple[Tensor, Tensor] | None = None
    """Weights and experts of each token, ``[N, k]``, with a shared expert ``[N, k + 1]``; None without a
    mixture of experts."""


@dataclass(frozen=True)
class Residual:
    """Says how an output joins the residual stream."""

    path: str
    """Path of the module whose input it is added to."""
    factor: float = 1.0
    """What it is multiplied by before."""
    normed: bool = False
    """Whether it passes a norm before."""


@contextmanager
def observing(
    block: nn.Module,
    groups: Sequence[InputGroup],
    mixture: ExpertMixture | None = None,
    *,
    residuals: bool = False,
    experts: bool = True,
    attention: ObserveAttention | None = None,
) -> Iterator[Observation]:
    """Fill an observation with the one batch that runs through ``block`` in this context.

    It has the inputs of the groups and of the mixture, where they are asked for those of its ``experts``, the
    residual stream with what is added to it, and the attention's queries and keys.
    """
    seen = Observation()

    def see_attention(attention: Attention) -> None:
        seen.attention = attention

    with ExitStack() as stack:

        def keep(module: str, name: str, residual: Residual | None) -> None:
            handles = _keep(seen, block, module, name, residual if residuals else None)
            for handle in handles:
                stack.callback(handle.remove)

        inputs = (entry for group in groups for entry in group.inputs.items())
        for name, (first, *_) in inputs:
            if experts or first.expert is None:
                keep(first.module, name, _residual(first))
        if mixture is not None:
            keep(mixture.module, mixture.module, Residual(mixture.residual))
            for handle in _keep_routing(seen, block, mixture):
                stack.callback(handle.remove)
        if attention is not None:
            stack.enter_context(attention(see_attention))
        yield seen


def _keep_routing(seen: Observation, block: nn.Module, mixture: ExpertMixture) -> Iterator[RemovableHandle]:
    def see_router(_module: nn.Module, _arguments: object, output: Any) -> None:
        seen.routing = output[1:]

    def see_shared_gate(_module: nn.Module, _arguments: object, output: Tensor) -> None:
        if seen.routing is not None:  # the router runs before
            scores, indices = seen.routing
            everywhere = torch.full_like(indices[:, :1], mixture.count)
            seen.routing = torch.cat((scores, output.sigmoid()), 1), torch.cat((indices, everywhere), 1)

    yield block.get_submodule(mixture.router).register_forward_hook(see_router)
    if mixture.shared_gate is not None:
        yield block.get_submodule(mixture.shared_gate).register_forward_hook(see_shared_gate)


def _residual(p: Projection) -> Residual | None:
    alone = p.residual is not None and p.expert is None
    return Residual(str(p.residual), p.residual_factor, normed=p.normed) if alone else None


def _keep(
    seen: Observation, block: nn.Module, module: str, name: str, residual: Residual | None
) -> Iterator[RemovableHandle]:
    """Keep the input of a module and, where it joins one, the residual stream and the output."""

    def keep_input(kept: dict[str, Tensor], path: str, factor: float = 1.0) -> RemovableHandle:
        def hook(_module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            kept[name] = arguments[0] if factor == 1 else arguments[0].float() / factor

        return block.get_submodule(path).register_forward_pre_hook(hook)

    def keep_output(_module: nn.Module, _arguments: tuple[Tensor, ...], output: Any) -> None:
        # some mixtures return their routing as well
        seen.outputs[name] = output[0] if isinstance(output, tuple) else output

    yield keep_input(seen.inputs, module)
    if residual is not None:
        yield keep_input(seen.residuals, residual.path, residual.factor)
        if not residual.normed:
            yield block.get_submodule(module).register_forward_hook(keep_output)
