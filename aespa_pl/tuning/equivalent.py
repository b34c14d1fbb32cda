"""Transform a block equivalently: its weights change, its output does not.

Where the inputs of some projections are linear in what another operation puts out, that operation may be
multiplied by an invertible matrix A and the columns of the projections by its inverse. A is diagonal, a
factor for each channel, behind a norm or behind rows that a factor passes through unchanged. Between the
values and the output projection it may be a matrix for each value head, because attention only mixes
positions.

Source: "OmniQuant: Omnidirectionally Calibrated Quantization for Large Language Models" (arXiv
2308.13137: factors); "AffineQuant: Affine Transformation Quantization for Large Language Models" (arXiv
2403.12544: matrices, gradual mask).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from aespa_pl.models.family import BlockLayout, FoldIntoRows, Projection
from aespa_pl.models.weights import projection_rows

STABILITY = 0.1
"""Factor alpha of the entries beside the diagonal: they learn so much more slowly (AffineQuant)."""
DOMINANCE = 0.9
"""Most that the entries beside the diagonal add up to, as a share of the diagonal; below 1 the matrix is
strictly diagonally dominant, and so invertible."""


class Transformation(nn.Module, ABC):
    """Stands for an invertible matrix A between an operation and the projections that see its output."""

    @abstractmethod
    def multiply(self, value: Tensor) -> Tensor:
        """Return ``A value``; ``value [channels, ...]`` is a weight's rows or a vector."""

    @abstractmethod
    def divide(self, weight: Tensor) -> Tensor:
        """Return ``weight A^-1``; ``weight [rows, columns]``."""


class ChannelFactors(Transformation):
    """Learns a positive factor for each channel, 1 at the start."""

    def __init__(self, heads: int, size: int, shared: int = 1) -> None:
        """Begin with 1, for heads of ``size`` channels.

        So many heads of the columns, one after the other, see the same head of channels: ``shared``.
        """
        super().__init__()
        self.shared = shared
        self.log_factor = nn.Parameter(torch.zeros(heads, size))

    def multiply(self, value: Tensor) -> Tensor:
        """Multiply each channel."""
        factor = self.log_factor.exp().flatten()
        return value * factor.view(-1, *[1] * (value.dim() - 1))

    def divide(self, weight: Tensor) -> Tensor:
        """Divide each column."""
        return weight / self.log_factor.exp().repeat_interleave(self.shared, 0).flatten()


class HeadMatrices(Transformation):
    """Learns a matrix for each head, 1 at the start, whose band around the diagonal grows with the epochs."""

    def __init__(self, heads: int, size: int, shared: int, epochs: int) -> None:
        """Begin with 1; ``epochs`` is their number, the other arguments are as in ``ChannelFactors``."""
        super().__init__()
        self.shared = shared
        self.epochs = epochs
        self.log_factor = nn.Parameter(torch.zeros(heads, size))
        self.mixing = nn.Parameter(torch.zeros(heads, size, size))
        place = torch.arange(size)
        self.register_buffer("distance", (place[:, None] - place).abs(), persistent=False)
        self.distance: Tensor
        self.width = 0.0
        """Distance from the diagonal up to which entries count."""

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
        """Mix the channels of each head."""
        A = self.matrices()
        return (A @ value.reshape(*A.shape[:2], -1)).view(value.shape)

    def divide(self, weight: Tensor) -> Tensor:
        """Mix the columns of each head, by the inverse."""
        A = self.matrices().repeat_interleave(self.shared, 0)
        parts = weight.unflatten(1, A.shape[:2]).transpose(0, 1)  # [heads, rows, size]
        found: Tensor = torch.linalg.solve(A, parts, left=False)
        return found.transpose(0, 1).flatten(1)


class OfVector(nn.Module):
    """Makes a norm's weight or bias under a transformation."""

    def __init__(self, transformation: Transformation, offset: float) -> None:
        """Take the transformation, which the projections behind the norm share, and the norm's offset."""
        super().__init__()
        self.transformation = transformation
        self.offset = offset

    def forward(self, value: Tensor) -> Tensor:
        """Return what the norm has instead of ``value [d]``."""
        return self.transformation.multiply(value + self.offset) - self.offset


class OfLayer(nn.Module):
    """Makes a linear layer's weight or bias under the transformations before and behind it."""

    def __init__(
        self,
        layout: BlockLayout,
        projections: Mapping[str, Projection],
        rows: Mapping[str, Transformation],
        columns: Transformation | None,
    ) -> None:
        """Take transformations of the rows of projections, and the one whose inverse the columns get.

        The projections, by name, make up the layer.
        """
        super().__init__()
        self.layout = layout
        self.projections = projections
        self.rows = nn.ModuleDict(rows)
        self.columns: Transformation | None = columns

    def forward(self, value: Tensor) -> Tensor:
        """Return what the layer has instead of ``value``, ``[rows, columns]`` or ``[rows]``."""
        if self.columns is not None and value.dim() == 2:
            value = self.columns.divide(value)
        whole = value.clone() if len(self.rows) else value
        for name, transformation in self.rows.items():
            p = self.projections[name]
            before = projection_rows(value, self.layout, p).flatten(0, 1)
            changed = cast(Transformation, transformation).multiply(before)
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
    rows: dict[str, Transformation] = {}
    columns: dict[str, Transformation] = {}
    made: Transformation
    for group in layout.groups:
        values = layout.values_before(group)
        if values is not None and not any(p.kept for p in (values, *group.projections)):
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
                found |= {f"{r}.weight": OfLayer(layout, {}, {}, made) for r in group.fold.readers}
        else:
            continue
        columns |= dict.fromkeys((p.module for p in group.projections), made)
    return found | _of_layers(layout, rows, columns, names)


def _of_layers(
    layout: BlockLayout,
    rows: Mapping[str, Transformation],
    columns: Mapping[str, Transformation],
    names: Mapping[str, Tensor],
) -> dict[str, nn.Module]:
    layers: dict[str, dict[str, Projection]] = {}
    for p in layout.projections:
        layers.setdefault(p.module, {})[p.name] = p
    found: dict[str, nn.Module] = {}
    for path, projections in layers.items():
        before = {name: rows[name] for name in projections if name in rows}
        if before or path in columns:
            made = OfLayer(layout, projections, before, columns.get(path))
            found[f"{path}.weight"] = made
            if before and f"{path}.bias" in names:
                found[f"{path}.bias"] = made
    return found
