"""Watch what a block does with one batch, as its modules see it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from aespa_pl.models.experts import ExpertMixture
from aespa_pl.models.family import InputGroup
from aespa_pl.models.observed import Attention

ObserveAttention = Callable[[Callable[[Attention], None]], AbstractContextManager[None]]
"""Opens a context in which its argument is called with what the block's attention does."""


@dataclass
class Observation:
    """Holds the tensors of one batch on its way through a block."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    """``X [B, L, d_in]`` by the input's name; an expert's has the tokens that are routed to it. The whole
    mixture of experts is here, and below, by the path of its module, whose input may be ``[B * L, d]``."""
    residuals: dict[str, Tensor] = field(default_factory=dict)
    """The residual stream ``[B, L, d]`` that an output is added to, by the input's name; divided by what the
    output is multiplied by, so that the two add up to the new stream in the units of the output."""
    outputs: dict[str, Tensor] = field(default_factory=dict)
    """Output ``[B, L, d]`` that is added to the residual stream, behind norms if there are some, by input."""
    norms: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """What the norms behind an output multiply it by, by input: ``1 / rms [B, L, 1]`` of the token, and the
    weight ``[d]``; of two norms the products of theirs."""
    attention: Attention | None = None
    """Queries and keys of the attention; None where they were not asked for."""
    routing: tuple[Tensor, Tensor] | None = None
    """Weights and experts of each token, ``[N, k]``, with a shared expert ``[N, k + 1]``; None without a
    mixture of experts."""


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
    seen, module = Observation(), block.get_submodule
    with ExitStack() as stack:
        for name, first in ((name, ps[0]) for group in groups for name, ps in group.inputs.items()):
            if experts or first.expert is None:
                _before(stack, module(first.module), partial(_keep_input, seen.inputs, name, 1))
            if residuals and first.residual is not None and first.expert is None:
                keep_residual = partial(_keep_input, seen.residuals, name, first.residual_factor)
                _before(stack, module(first.residual), keep_residual)
                _after(stack, module((first.module, *first.norms)[-1]), partial(_keep_output, seen, name))
            for norm in first.norms if first.expert is None else ():
                _after(stack, module(norm), partial(_keep_norm, seen, name))
        if mixture is not None:
            name = mixture.module
            _before(stack, module(name), partial(_keep_input, seen.inputs, name, 1))
            _after(stack, module(mixture.router), partial(_keep_routing, seen, mixture))
            if mixture.shared_gate is not None:
                _after(stack, module(mixture.shared_gate), partial(_keep_gate, seen))
            if residuals:
                keep_residual = partial(_keep_input, seen.residuals, name, mixture.residual_factor)
                _before(stack, module(mixture.residual), keep_residual)
                _after(stack, module((name, *mixture.norms)[-1]), partial(_keep_output, seen, name))
            for norm in mixture.norms:
                _after(stack, module(norm), partial(_keep_norm, seen, name))
        if attention is not None:
            stack.enter_context(attention(partial(setattr, seen, "attention")))
        yield seen


def _before(stack: ExitStack, module: nn.Module, hook: Callable[..., None]) -> None:
    stack.callback(module.register_forward_pre_hook(hook).remove)


def _after(stack: ExitStack, module: nn.Module, hook: Callable[..., None]) -> None:
    stack.callback(module.register_forward_hook(hook).remove)


def _keep_input(
    kept: dict[str, Tensor], name: str, factor: float, _module: nn.Module, arguments: tuple[Tensor, ...]
) -> None:
    kept[name] = arguments[0] if factor == 1 else arguments[0].float() / factor


def _keep_output(seen: Observation, name: str, _module: nn.Module, _arguments: object, output: Any) -> None:
    # some mixtures return their routing as well
    seen.outputs[name] = output[0] if isinstance(output, tuple) else output


def _keep_norm(
    seen: Observation, name: str, norm: Any, arguments: tuple[Tensor, ...], _output: Tensor
) -> None:
    output = arguments[0].float()
    epsilon = getattr(norm, "variance_epsilon", None) or norm.eps
    # some norms add 1 to their weight; forward() runs no hooks
    weight = norm.forward(torch.ones_like(output[0, 0])) * (1 + epsilon) ** 0.5
    inverse = (output.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    if name in seen.norms:
        before, weight_before = seen.norms[name]
        inverse, weight = inverse * before, weight * weight_before
    seen.norms[name] = inverse, weight


def _keep_routing(
    seen: Observation, mixture: ExpertMixture, _module: nn.Module, _arguments: object, output: Any
) -> None:
    """Keep weights and experts of all tokens, the shared expert's among them."""
    _, scores, indices = output
    if mixture.shared is not None:
        scores = torch.cat((scores, torch.ones_like(scores[:, :1])), 1)
        indices = torch.cat((indices, torch.full_like(indices[:, :1], mixture.count)), 1)
    seen.routing = scores, indices


def _keep_gate(seen: Observation, _module: nn.Module, _arguments: object, output: Tensor) -> None:
    """Keep the weights of the shared expert."""
    if seen.routing is not None:  # the router runs before
        scores, indices = seen.routing
        seen.routing = torch.cat((scores[:, :-1], output.sigmoid()), 1), indices
