"""Learn ranges of grids, and equivalent transformations: a block's weights change, its output does not.

Where the inputs of some projections are linear in what another operation puts out, that operation may be
multiplied by an invertible matrix A and the columns of the projections by its inverse. A is diagonal, a
factor for each channel, behind a norm or behind rows that a factor passes through unchanged. Between the
values and the output projection it may be a matrix for each value head, because attention only mixes
positions.

Source: "OmniQuant: Omnidirectionally Calibrated Quantization for Large Language Models" (arXiv 2308.13137:
ranges, factors); "AffineQuant: Affine Transformation Quantization for Large Language Models" (arXiv
2403.12544: matrices, gradual mask).
"""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from aespa_pl.algorithm.grid import min_max_range
from aespa_pl.algorithm.grid_types import round_to_half
from aespa_pl.algorithm.quantizer import QuantizedWeight, scaled_steps
from aespa_pl.models.family import BlockLayout, FoldIntoRows
from aespa_pl.models.weights import projection_rows
from aespa_pl.tuning.parametrization import WeightParametrization, straight_through

START = 4.0
"""Strengths begin at ``sigmoid(4) = 0.982`` (OmniQuant)."""
STABILITY = 0.1
"""Factor alpha of the entries beside the diagonal: they learn so much more slowly (AffineQuant)."""
DOMINANCE = 0.9
"""Most that the entries beside the diagonal add up to, as a share of the diagonal; below 1 the matrix is
strictly diagonally dominant, and so invertible."""


class ChannelFactors(nn.Module):
    """Learns a positive factor for each channel, 1 at the start: a diagonal A."""

    def __init__(self, heads: int, size: int, shared: int = 1) -> None:
        """Take the number of heads, their channels, and how many heads of the columns see the same one."""
        super().__init__()
        self.shared = shared
        self.log_factor = nn.Parameter(torch.zeros(heads, size))

    def multiply(self, value: Tensor) -> Tensor:
        """Return ``A value``; ``value [channels, ...]`` is a weight's rows or a vector."""
        factor = self.log_factor.exp().flatten()
        return value * factor.view(-1, *[1] * (value.dim() - 1))

    def divide(self, weight: Tensor) -> Tensor:
        """Return ``weight A^-1``; ``weight [rows, columns]``."""
        return weight / self.log_factor.exp().repeat_interleave(self.shared, 0).flatten()


class HeadMatrices(ChannelFactors):
    """Learns a matrix for each head, 1 at the start, whose band around the diagonal grows with the epochs."""

    def __init__(self, heads: int, size: int, shared: int, epochs: int) -> None:
        super().__init__(heads, size, shared)
        self.epochs = epochs
        self.mixing = nn.Parameter(torch.zeros(heads, size, size))
        place = torch.arange(size)
        self.register_buffer("distance", (place[:, None] - place).abs(), persistent=False)
        self.distance: Tensor
        self.width = 0.0  # distance from the diagonal up to which entries count

    def enter_epoch(self, epoch: int) -> None:
        """Widen the band: ``size * epoch / epochs``; 0 is the start, where there is the diagonal alone."""
        self.width = len(self.distance) * epoch / self.epochs

    def matrices(self) -> Tensor:
        """Return A ``[heads, size, size]``, strictly diagonally dominant."""
        band = (self.distance > 0) & (self.distance <= self.width)
        beside = STABILITY * self.mixing * band
        sums = beside.abs().sum(-1, keepdim=True)
        beside = beside * (DOMINANCE / sums.clamp(min=DOMINANCE))
        diagonal = torch.eye(len(self.distance), dtype=beside.dtype, device=beside.device)
        return self.log_factor.exp()[..., None] * (diagonal + beside)

    def multiply(self, value: Tensor) -> Tensor:
        """Return ``A value``, which mixes the channels of each head."""
        A = self.matrices()
        return (A @ value.reshape(*A.shape[:2], -1)).view(value.shape)

    def divide(self, weight: Tensor) -> Tensor:
        """Return ``weight A^-1``, which mixes the columns of each head."""
        A = self.matrices().repeat_interleave(self.shared, 0)
        parts = weight.unflatten(1, A.shape[:2]).transpose(0, 1)  # [heads, rows, size]
        found: Tensor = torch.linalg.solve(A, parts, left=False)
        return found.transpose(0, 1).flatten(1)


class OfVector(nn.Module):
    """Makes the weight or bias of a norm, which adds an offset to it, under a transformation."""

    def __init__(self, transformation: ChannelFactors, offset: float) -> None:
        super().__init__()
        self.transformation = transformation
        self.offset = offset

    def forward(self, value: Tensor) -> Tensor:
        """Return what the norm has instead of ``value [d]``."""
        return self.transformation.multiply(value + self.offset) - self.offset


class OfLayer(nn.Module):
    """Makes a linear layer's weight or bias under the transformations before and behind it."""

    def __init__(
        self, layout: BlockLayout, rows: Mapping[str, ChannelFactors], columns: ChannelFactors | None
    ) -> None:
        """Take transformations of the rows of projections, by name, and the one whose inverse columns get."""
        super().__init__()
        self.layout = layout
        self.rows = nn.ModuleDict(rows)
        self.columns: ChannelFactors | None = columns

    def forward(self, value: Tensor) -> Tensor:
        """Return what the layer has instead of ``value``, ``[rows, columns]`` or ``[rows]``."""
        if self.columns is not None and value.dim() == 2:
            value = self.columns.divide(value)
        whole = value.clone() if len(self.rows) else value
        for p in (p for p in self.layout.projections if p.name in self.rows):
            before = projection_rows(value, self.layout, p).flatten(0, 1)
            changed = cast(ChannelFactors, self.rows[p.name]).multiply(before)
            rows = projection_rows(whole, self.layout, p)  # a view
            rows.copy_(changed.view(rows.shape))
        return whole


def transformations_of(
    block: nn.Module, layout: BlockLayout, *, matrices: bool, epochs: int
) -> dict[str, nn.Module]:
    """Return what each parameter of a block becomes, by its name, wherever something can be folded.

    With ``matrices`` a value head gets a matrix instead of factors, which fills over the epochs.
    """
    names = dict(block.named_parameters())
    found: dict[str, nn.Module] = {}
    rows: dict[str, ChannelFactors] = {}
    columns: dict[str, ChannelFactors] = {}
    for group in layout.groups:
        values = layout.values_before(group)
        kept = values is not None and any(p.kept for p in (values, *group.projections))
        if values is not None and not kept and not layout.values_normed:
            heads = layout.key_value_heads, layout.head_dim, layout.heads // layout.key_value_heads
            mixes = matrices and not layout.gated  # a gate lets no channel into another
            made = HeadMatrices(*heads, epochs) if mixes else ChannelFactors(*heads)
            rows[values.name] = made
        elif group.fold is not None:
            made = ChannelFactors(1, names[f"{group.projections[0].module}.weight"].shape[1])
            if isinstance(group.fold, FoldIntoRows):
                rows[group.fold.projection] = made
            else:
                both = (f"{group.fold.module}.{kind}" for kind in ("weight", "bias"))
                found |= {n: OfVector(made, group.fold.offset) for n in both if n in names}
                found |= {f"{r}.weight": OfLayer(layout, {}, made) for r in group.fold.readers}
        else:
            continue
        columns |= dict.fromkeys((p.module for p in group.projections), made)
    for path in dict.fromkeys(p.module for p in layout.projections):
        before = {p.name: rows[p.name] for p in layout.projections if p.module == path and p.name in rows}
        of_layer = OfLayer(layout, before, columns.get(path))
        if before or path in columns:
            found[f"{path}.weight"] = of_layer
        if before and f"{path}.bias" in names:
            found[f"{path}.bias"] = of_layer
    return found


class Clipped(WeightParametrization):
    """Learns how much of the smallest and largest weight of each row and group its grid's range has.

    The strengths beta and gamma are between 0 and 1: ``s = (gamma max W - beta min W) / (2 ** bits - 1)``,
    ``z = -round(beta min W / s)`` (OmniQuant, Eq. 2). The weight that is rounded is the original one, under
    the block's equivalent transformation if there is one, to the nearest integer, with its gradient passed
    on. Integers and grids that earlier steps have found play no part.
    """

    def __init__(
        self, start: QuantizedWeight, target: Tensor, *, symmetric: bool, transform: nn.Module | None = None
    ) -> None:
        """Start at nearly the min-max grid of ``target``, with bits and groups of ``start``.

        A symmetric grid has its zero point in the middle, and one strength, of the largest absolute weight.
        """
        super().__init__()
        self.bits = start.bits
        self.symmetric = symmetric
        self.transform = nn.Identity() if transform is None else transform
        strengths = torch.full((1 if symmetric else 2, *start.scale.shape), START)
        self.strengths = nn.Parameter(strengths.to(target.device))
        self._start = target

    def forward(self, latent: Tensor) -> Tensor:
        """Return the weight of the nearest integers."""
        return scaled_steps(*self._rounded(latent))

    @torch.no_grad()
    def quantized(self, latent: Tensor) -> QuantizedWeight:
        """Return the nearest integers, and the grid."""
        q, scale, zero_point = self._rounded(latent)
        return QuantizedWeight(q.to(torch.uint8), scale, zero_point, self.bits)

    def _rounded(self, latent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return integers ``[rows, d_in]``, and scale and zero point ``[rows, groups]``."""
        W = self.transform(latent).unflatten(1, (self.strengths.shape[-1], -1))
        largest = 2**self.bits - 1
        low, high = min_max_range(W, symmetric=self.symmetric)
        strengths = self.strengths.sigmoid()
        low, high = strengths[0] * low, strengths[-1] * high
        exact = (high - low) / largest
        scale = straight_through(round_to_half(exact), exact)
        if self.symmetric:
            zero_point = torch.full_like(scale, 2 ** (self.bits - 1))
        else:
            exact = -low / scale
            zero_point = straight_through(exact.round(), exact).clamp(0, largest)
        steps = W / scale[..., None]
        q = straight_through(steps.round(), steps) + zero_point[..., None]
        return q.clamp(0, largest).flatten(1), scale, zero_point
