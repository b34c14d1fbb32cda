"""Add up what the end loss says of a block: second moments of inputs, and of the gradients at outputs."""

from collections import Counter

import torch
from torch import Tensor

from aespa_pl.algorithm.second_moments import add_gram, mirror
from aespa_pl.models.family import BlockLayout, Projection, Role
from aespa_pl.models.weights import projection_rows

LARGEST = 10.0
"""Largest square of a token's gradient in G, beside the median of its segment. Behind a norm the gradient of
an output that is next to 0 is large: that of BOS is up to 0.93 of the sum over all tokens in Gemma 3 270M."""
MOST_ROWS = 8192
"""Rows of a head up to which the end loss couples them: G has their square, for each projection on disk."""


class Moments:
    """Adds up second moments over batches, and the tokens that each input has had."""

    def __init__(self) -> None:
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.tokens = Counter[str]()

    def add_inputs(self, name: str, x: Tensor) -> None:
        """Add the inputs ``[..., d_in]`` of a batch."""
        flat = x.flatten(0, -2).float()
        self.tokens[name] += len(flat)
        if name not in self.inputs:
            self.inputs[name] = flat.new_zeros(flat.shape[1], flat.shape[1])
        add_gram(self.inputs[name], flat)

    def add_outputs(self, name: str, gradient: Tensor) -> None:
        """Add the squares of the gradients ``[..., rows]`` at the outputs of a batch."""
        squares = gradient.flatten(0, -2).float().square().sum(0)
        self.outputs[name] = self.outputs.get(name, 0) + squares

    def mean_input(self, name: str) -> Tensor:
        """Return ``E[x x^T]`` ``[d_in, d_in]`` of an input."""
        mirror(self.inputs[name])
        return self.inputs[name] / self.tokens[name]


class Couplings(Moments):
    """Adds up ``g g^T`` of the outputs of projections instead, each head's by itself."""

    def __init__(self, layout: BlockLayout) -> None:
        super().__init__()
        self.layout = layout
        self.by_module: dict[str, list[Projection]] = {}
        for p in layout.projections:
            if couples(p):
                self.by_module.setdefault(p.module, []).append(p)

    def add_inputs(self, name: str, x: Tensor) -> None:
        """Do nothing."""

    def add_outputs(self, name: str, gradient: Tensor) -> None:
        """Add the products of the gradients ``[..., rows]`` of a batch, none with too large a square."""
        if name not in self.by_module:
            return
        rows = gradient.flatten(0, -2).float().T  # [rows of the module, tokens]
        size = rows.square().sum(0)
        most = LARGEST * size.median()
        rows = torch.where((size > most) & (most > 0), rows * (most / size).sqrt(), rows)
        for p in self.by_module[name]:
            g = projection_rows(rows, self.layout, p).reshape(self.layout.heads_of(p.role), -1, rows.shape[1])
            if g.shape[1] <= MOST_ROWS:
                self.outputs[p.name] = self.outputs.get(p.name, 0) + g @ g.mT


def couples(projection: Projection) -> bool:
    """Tell whether the end loss couples the rows of a projection, as far as this is taken into account.

    The errors of V's outputs are mixed by the attention before they count; an expert sees few tokens.
    """
    return projection.role is not Role.VALUE and projection.expert is None and not projection.kept
