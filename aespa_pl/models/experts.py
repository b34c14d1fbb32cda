"""Give every expert of a mixture linear layers of its own, and find them in tensors that hold all experts.

transformers keeps the matrices of all experts in one tensor. Here each expert is a module with three linear
layers, so that everything that works on linear layers works on experts as well.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

DENSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
"""Names in config.json of the number of blocks before those with experts."""
SPARSE = "sparse"
"""Name of a block with experts in ``config.mlp_layer_types``."""
NAME = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
Gated = Callable[[Tensor, Tensor], Tensor]
"""Returns the input of the last matrix from the outputs of gate and up."""


@dataclass(frozen=True)
class ExpertMixture:
    """Describes the mixture of experts of a block."""

    module: str
    """Path of the module whose input all tokens are, and whose output, behind ``norms``, is added to the
    residual stream."""
    router: str
    """Path of the module that returns logits, weights ``[N, k]`` and experts ``[N, k]`` of each token."""
    experts: str
    """Path of the list of experts."""
    count: int
    """Number of experts."""
    chosen: int
    """Number k of experts that a token is routed to."""
    residual: str
    """Path of the module whose input the output is added to."""
    input_norm: str | None = None
    """Path of the norm before the experts; None: it is ``residual``."""
    norms: tuple[str, ...] = ()
    """Paths of the norms between the output and what it is added to, in the order that it passes them."""
    residual_factor: float = 1.0
    """What the output is multiplied by before it is added (Granite)."""
    shared: str | None = None
    """Path of the shared expert, to which all tokens are routed; its number comes after those of the others.
    None: there is none."""
    shared_gate: str | None = None
    """Path of the linear layer whose output, behind a sigmoid, is the weight of the shared expert; None: its
    weight is 1."""

    @property
    def total(self) -> int:
        """Return the number of experts, with the shared one."""
        return self.count + (self.shared is not None)

    def share(self, expert: int) -> float:
        """Return the share of the tokens that an expert gets, on average."""
        return self.chosen / self.count if expert < self.count else 1.0


@dataclass(frozen=True)
class Part:
    """Says which part of a tensor of all experts, ``[experts, ...]``, is a tensor of one."""

    expert: int | None
    """None: the tensor is of one expert, and has several of its matrices."""
    number: int
    """Number of the matrix among those whose rows are side by side."""
    count: int
    interleaved: bool = False
    """Whether the rows of the matrices alternate; otherwise one matrix follows the other."""
    transposed: bool = False
    """Whether the tensor has columns before rows."""

    def of(self, tensor: Any) -> Tensor:
        """Return the part, a view; a file's slice will do for the tensor."""
        one: Tensor = tensor[:] if self.expert is None else tensor[self.expert]
        if self.transposed and one.dim() == 2:
            one = one.mT
        if self.count == 1:
            return one
        return one[self.number :: self.count] if self.interleaved else one.chunk(2)[self.number]


@dataclass(frozen=True)
class Fused:
    """Says how the library stores gate, up and down of all experts in one or two tensors."""

    interleaved: bool = False
    transposed: bool = False

    def places(self, name: str) -> tuple[tuple[str, Part], ...]:
        """Return the tensor of all experts that a tensor of one lies in, and the part of it; else nothing."""
        match = NAME.fullmatch(name)
        if match is None:
            return ()
        path, expert, kind, parameter = match.groups()
        fused = "down_proj" if kind == "down" else "gate_up_proj"
        ending = "" if parameter == "weight" else "_bias"
        number, count = (0, 1) if kind == "down" else (("gate", "up").index(kind), 2)
        part = Part(int(expert), number, count, self.interleaved, self.transposed)
        return ((f"{path}.{fused}{ending}", part),)


def joined(parts: Sequence[tuple[Part, Tensor]]) -> Tensor:
    """Return the tensor of all experts from the parts of each."""
    first, one = parts[0]
    rows, *columns = one.shape
    shape = (first.count * rows, *columns)
    experts = () if first.expert is None else (1 + max(cast(int, part.expert) for part, _ in parts),)
    whole = one.new_empty(*experts, *(reversed(shape) if first.transposed else shape))
    for part, tensor in parts:
        part.of(whole).copy_(tensor)
    return whole


def dense_blocks(config: PreTrainedConfig) -> int:
    """Return the number of blocks before those with experts."""
    if (kinds := getattr(config, "mlp_layer_types", None)) is not None:
        return (*kinds, SPARSE).index(SPARSE)
    return max(int(getattr(config, name, 0)) for name in DENSE)


class Expert(nn.Module):
    """Runs one gated feed-forward network."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear, gated: Gated) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down
        self.gated = gated

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the outputs ``[T, d]`` of the tokens ``[T, d]``."""
        return cast(Tensor, self.down_proj(self.inner(hidden)))

    def inner(self, hidden: Tensor) -> Tensor:
        """Return the inputs of the last matrix."""
        return self.gated(self.gate_proj(hidden), self.up_proj(hidden))


class Experts(nn.ModuleList):
    """Runs each expert on the tokens that are routed to it; stands in for the library's module."""

    def forward(self, hidden: Tensor, indices: Tensor, scores: Tensor) -> Tensor:
        """Return outputs ``[N, d]`` of tokens ``[N, d]``; their experts and scores are ``[N, k]``."""
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
    return cast(tuple[Tensor, Tensor], (indices == expert).nonzero(as_tuple=True))


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """Return a linear layer that shares the memory of its tensors."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


def taken_apart(module: nn.Module, fused: Fused, gated: Gated) -> Experts:
    """Return the experts of the library's module, whose memory they share."""
    tensors = dict(module.named_parameters(recurse=False))

    def taken(name: str) -> Tensor:
        ((place, part),) = fused.places(f".experts.{name}")
        return part.of(tensors[place.removeprefix(".experts.")])

    def layer(name: str) -> nn.Linear:
        bias = taken(f"{name}.bias") if "down_proj_bias" in tensors else None
        return linear(taken(f"{name}.weight"), bias)

    def expert(number: int) -> Expert:
        gate, up, down = (layer(f"{number}.{kind}_proj") for kind in ("gate", "up", "down"))
        return Expert(gate, up, down, gated)

    return Experts(map(expert, range(len(tensors["down_proj"]))))
