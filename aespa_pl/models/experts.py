"""Give every expert of a mixture linear layers of its own, and find them in tensors that hold all experts.

transformers keeps the matrices of all experts in one tensor. Here each expert is a module with three linear
layers, so that everything that works on linear layers works on experts as well.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from aespa_pl.models.family import FoldIntoNorm, FoldIntoRows, InputGroup, Projection
from aespa_pl.models.parts import ExpertMixture, Fused

Gated = Callable[[Tensor, Tensor], Tensor]
"""Returns the input of the last matrix from the outputs of gate and up."""


class Expert(nn.Module):
    """Runs one gated feed-forward network."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear, gated: Gated) -> None:
        """Take the layers, and what joins the outputs of gate and up."""
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down
        self.gated = gated

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the outputs ``[T, d]`` of the tokens ``[T, d]``."""
        down: Tensor = self.down_proj(self.inner(hidden))
        return down

    def inner(self, hidden: Tensor) -> Tensor:
        """Return the inputs of the last matrix."""
        return self.gated(self.gate_proj(hidden), self.up_proj(hidden))


class Experts(nn.ModuleList):
    """Runs each expert on the tokens that are routed to it; stands in for the library's module."""

    def forward(self, hidden: Tensor, indices: Tensor, scores: Tensor) -> Tensor:
        """Return the outputs ``[N, d]``.

        Args:
            hidden: Tokens ``[N, d]``.
            indices: Experts of each token, ``[N, k]``.
            scores: Their weights, ``[N, k]``.
        """
        output = torch.zeros_like(hidden)
        for number, expert in enumerate(self):
            token, place = routed(indices, number)
            weighted = expert(hidden[token]) * scores[token, place, None]
            output.index_add_(0, token, weighted.to(output.dtype))
        return output


def routed(indices: Tensor, expert: int) -> tuple[Tensor, Tensor]:
    """Return the tokens that an expert gets, and the place of the expert among those of the token."""
    if indices.is_meta:  # shapes are all that is asked for
        token = torch.arange(len(indices), device="meta")
        return token, torch.zeros_like(token)
    token, place = (indices == expert).nonzero(as_tuple=True)
    return token, place


def taken_apart(module: nn.Module, fused: Fused, gated: Gated) -> Experts:
    """Return the experts of the library's module, whose memory they share."""
    tensors = dict(module.named_parameters(recurse=False))

    def taken(name: str) -> Tensor:
        place, part = fused.place_of(f".experts.{name}")
        return part.of(tensors[place.removeprefix(".experts.")])

    def layer(name: str) -> nn.Linear:
        weight, has_bias = taken(f"{name}.weight"), "down_proj_bias" in tensors
        rows, columns = weight.shape
        made = nn.Linear(columns, rows, bias=has_bias, device="meta")
        made.weight = nn.Parameter(weight, requires_grad=False)
        if has_bias:
            made.bias = nn.Parameter(taken(f"{name}.bias"), requires_grad=False)
        return made

    def expert(number: int) -> Expert:
        gate, up, down = (layer(f"{number}.{kind}_proj") for kind in ("gate", "up", "down"))
        return Expert(gate, up, down, gated)

    return Experts(map(expert, range(len(tensors["down_proj"]))))


def expert_groups(
    mixture: ExpertMixture, fold: FoldIntoNorm, shared: str | None = None, *, linear_in_up: bool = True
) -> tuple[InputGroup, ...]:
    """Return the groups of a mixture's experts: one input for gate and up of all, one for each down.

    All experts share the zeta of their input, because it is folded into one norm.

    Args:
        mixture: The mixture.
        fold: Says what takes the zeta of its input.
        shared: Path of the shared expert; None: there is none.
        linear_in_up: Whether a factor of an output of up is one of an input of down.
    """
    ups: list[Projection] = []
    downs: list[InputGroup] = []
    each = {f"expert_{number}": f"{mixture.experts}.{number}" for number in range(mixture.count)}
    if shared is not None:
        each["shared_expert"] = shared
    for number, (name, path) in enumerate(each.items()):
        ups += (
            Projection(f"{name}_{kind}_proj", f"{path}.{kind}_proj", expert=number) for kind in ("gate", "up")
        )
        down = Projection(f"{name}_down_proj", f"{path}.down_proj", residual=mixture.residual, expert=number)
        rows = FoldIntoRows(f"{name}_up_proj") if linear_in_up else None
        downs.append(InputGroup(f"{name}_hidden", (down,), rows))
    return (InputGroup("mlp_input", tuple(ups), fold), *downs)
