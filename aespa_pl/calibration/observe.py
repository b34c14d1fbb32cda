"""Watch what a block does with one batch, as its modules see it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn

from aespa_pl.models.family import Attention, InputGroup

ObserveAttention = Callable[[Callable[[Attention], None]], AbstractContextManager[None]]
"""Opens a context in which its argument is called with what the block's attention does."""


@dataclass
class Observation:
    """Holds the tensors of one batch on its way through a block."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    """``X [B, L, d_in]`` by input group."""
    residuals: dict[str, Tensor] = field(default_factory=dict)
    """The residual stream ``[B, L, d]`` that a group's output is added to, by input group.

    It is divided by what the output is multiplied by, so that the two add up to the new stream in the units
    of the output."""
    outputs: dict[str, Tensor] = field(default_factory=dict)
    """Output ``[B, L, d]`` that is added to the residual stream without a norm between, by input group."""
    attention: Attention | None = None
    """Queries and keys of the attention; None where they were not asked for."""


@contextmanager
def observing(
    block: nn.Module,
    groups: Sequence[InputGroup],
    *,
    residuals: bool = False,
    attention: ObserveAttention | None = None,
) -> Iterator[Observation]:
    """Fill an observation with the one batch that runs through ``block`` in this context.

    It has the inputs of the groups and, where they are asked for, the residual stream with what is added to
    it, and the attention's queries and keys.
    """
    seen = Observation()

    def see_attention(attention: Attention) -> None:
        seen.attention = attention

    with ExitStack() as stack:

        def keep_input(
            module: str, kept: dict[str, Tensor], name: str, factor: float = 1.0
        ) -> None:
            def hook(_module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
                kept[name] = arguments[0] if factor == 1 else arguments[0].float() / factor

            handle = block.get_submodule(module).register_forward_pre_hook(hook)
            stack.callback(handle.remove)

        def keep_output(module: str, name: str) -> None:
            def hook(_module: nn.Module, _arguments: tuple[Tensor, ...], output: Tensor) -> None:
                seen.outputs[name] = output

            stack.callback(block.get_submodule(module).register_forward_hook(hook).remove)

        for group in groups:
            first = group.projections[0]
            keep_input(first.module, seen.inputs, group.name)
            if residuals and first.residual is not None:
                keep_input(first.residual, seen.residuals, group.name, first.residual_factor)
                if not first.normed:
                    keep_output(first.module, group.name)
        if attention is not None:
            stack.enter_context(attention(see_attention))
        yield seen
