"""Hold a block on its way from weights to integers: the one object that its steps hand on.

It begins without grids. ``correct`` changes the weights that are aimed at. ``fit_grids`` finds grids and
rounds to nearest on them: this is a quantized block. ``update`` and ``learn`` and ``polish`` find better
integers.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor, nn

from aespa_pl.algorithm.grid import min_max_grid
from aespa_pl.algorithm.grid_types import TYPES
from aespa_pl.algorithm.hessian import damped, damping_for
from aespa_pl.algorithm.objectives import reconstruction_loss
from aespa_pl.algorithm.quantizer import Grid, GridFormat, QuantizedWeight, StoredWeight, dequantize, quantize
from aespa_pl.calibration.statistics import BlockStatistics, Hessian
from aespa_pl.distributed.processes import ALONE, RowShare, World
from aespa_pl.errors import NumericalError
from aespa_pl.measure import release_memory
from aespa_pl.models.family import BlockLayout, FoldIntoRows, InputGroup, Projection, Role
from aespa_pl.models.weights import projection_weight
from aespa_pl.settings import QuantizationSettings
from aespa_pl.settings.types import Damping


@dataclass(frozen=True)
class Rows:
    """Holds some rows of a projection with the Hessians that they need, all in memory."""

    weight: Tensor
    """``[heads, rows, d_in]``, float32: the weight that is aimed at."""
    grid: Grid
    """Grid of these rows, before folding."""
    integers: Tensor
    """``[heads, rows, d_in]``, uint8."""
    row_factor: Tensor
    """``[heads, rows]``, as of the projection."""
    hessian: Tensor
    """Damped H, ``[1, d_in, d_in]``, or ``[heads, d_in, d_in]`` where each head has its own."""
    other_side: Tensor | None
    """G ``[heads, rows, rows]``, damped; None where the objective has none."""

    def loss(self) -> Tensor:
        """Return ``tr(G dW H dW^T)`` of the integers, by row ``[heads, rows]`` or with G ``[heads, 1]``."""
        dW = dequantize(self.integers, self.grid) - self.weight
        return reconstruction_loss(dW, self.hessian, self.other_side)


@dataclass
class QuantizedProjection:
    """Holds one projection, from weight to integers; the steps of a block change it in place."""

    projection: Projection
    weight: Tensor
    """The weight that is aimed at, ``[heads, rows, d_in]``, float32: the original one, or with
    input_correction the one that makes up for earlier blocks' errors; columns of dead inputs are 0 where
    anything depends on the inputs."""
    hessian: Hessian
    other_side: Tensor | None
    """G ``[heads, rows, rows]``, damped, where the objective couples the rows of a head; None elsewhere."""
    row_factor: Tensor
    """``[heads, rows]``: zeta of the next input group, which is folded into the rows; 1 where none is."""
    learned: bool = False
    """Whether the rounding is learned (step 4)."""
    grid: Grid = field(init=False)
    """Grid before folding; it is there from step 2 on, as the integers are."""
    integers: Tensor = field(init=False)
    """Best integers so far, uint8, ``[heads, rows, d_in]``."""
    updated: Tensor | None = None
    """W', the weights at the moment when OPTQ was about to round them, until learning has begun there; None
    where no rounding is learned."""
    measured: dict[str, float] = field(default_factory=lambda: {"extra_damping": 0.0})
    """Losses and other numbers that the steps leave for the journal."""
    descent: list[float] = field(default_factory=list)
    """Loss before the polish, and after each of its passes."""

    @property
    def heads(self) -> int:
        """Return the number of heads that the rows are split into; 1 where heads do not matter."""
        return self.weight.shape[0]

    @property
    def folded_grid(self) -> Grid:
        """Return the grid of the block as it is stored: zeta is 1, and float16 holds every scale."""
        return self.grid.folded(self.row_factor)

    def stored(self) -> StoredWeight:
        """Return the weight as it is stored, ``[rows, d_in]``: zeta is folded into what comes before."""
        grid = self.folded_grid
        if grid.factors is not None:
            return grid.factors.stored(self.integers.flatten(0, 1))
        scale, zero_point = grid.scale.flatten(0, 1), grid.zero_point.flatten(0, 1)
        return QuantizedWeight(self.integers.flatten(0, 1), scale, zero_point, grid.bits)

    def share(self, world: World, *, coupled: bool = True) -> RowShare:
        """Return which rows this process works on: whole heads where a G of them counts, else single ones.

        That of Q and K counts in all steps, another one where it is ``coupled`` in.
        """
        of_scores = self.projection.role in (Role.QUERY, Role.KEY)
        knows_g = self.other_side is not None and (coupled or of_scores)
        by_heads = knows_g or len(self.hessian) > 1
        return RowShare(self.heads, self.weight.shape[1], by_heads, world)

    def problems(self, share: RowShare) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield weight and H of the rows of a share: all at once, or head by head where H is on disk."""
        weight, taken = share.part(self.weight), share.taken_heads
        if self.hessian.in_memory:
            yield weight, self.hessian[:] if len(self.hessian) == 1 else self.hessian[taken]
            return
        for i, head in enumerate(range(taken.start, taken.stop)):
            yield weight[i : i + 1], self.hessian[head : head + 1]

    def rows(self, share: RowShare, integers: Tensor | None = None) -> Iterator[Rows]:
        """Yield the rows of a share, each of its ``problems``, with other ``integers`` if they are given.

        They have G where the share is of whole heads and H in memory.
        """
        q, factor = share.part(self.integers if integers is None else integers), share.part(self.row_factor)
        grid, G = self.grid.merged(share.part), self.other_side if share.by_heads else None
        G = G[share.taken_heads] if G is not None and self.hessian.in_memory else None
        for i, (weight, H) in enumerate(self.problems(share)):
            heads = slice(i, i + len(weight))  # all, or the one
            yield Rows(weight, grid.heads(i, len(weight)), q[heads], factor[heads], H, G)

    def loss(self, integers: Tensor) -> Tensor:
        """Return the loss of all rows with other ``integers``, as ``Rows.loss``."""
        return torch.cat([rows.loss() for rows in self.rows(self.share(ALONE), integers)])


@dataclass
class QuantizedBlock:
    """Holds all projections of one block, and where their factors are folded."""

    index: int
    layout: BlockLayout
    projections: dict[str, QuantizedProjection]
    magnitudes: Mapping[str, Tensor] = field(default_factory=dict)
    """Mean absolute inputs ``[d_in]`` by input group, where they were collected."""
    tokens: int = 0
    """Number of calibration tokens."""

    @classmethod
    def begin(
        cls,
        index: int,
        module: nn.Module,
        layout: BlockLayout,
        statistics: BlockStatistics,
        settings: QuantizationSettings,
    ) -> "QuantizedBlock":
        """Return a block without grids.

        Its weights may share the memory of the ``module``, and it damps the Hessians of ``statistics``.
        """
        projections = {}
        inputs = ((n, ps) for group in layout.groups for n, ps in group.inputs.items())
        for name, p in ((n, p) for n, ps in inputs for p in ps if not p.kept):
            weight = projection_weight(module, layout, p).float()
            weight = weight.view(layout.heads_of(p.role), -1, weight.shape[-1])
            hessian = statistics.inputs[name]
            if p.role is Role.VALUE and statistics.attended is not None:
                hessian = statistics.attended
            G = {Role.QUERY: statistics.g_query, Role.KEY: statistics.g_key}.get(p.role)
            if p.name in statistics.couplings:
                G = statistics.couplings[p.name]
            elif G is not None:
                # or errors of Q grow where keys are small, and of K where queries are (docs/algorithm.md)
                G = damped(G, settings.objective.query_key_damping)
            learned = settings.learns(attention=p.role is not Role.OTHER)
            quantized = QuantizedProjection(p, weight, hessian, G, torch.ones_like(weight[..., 0]), learned)
            if name in statistics.reached:
                quantized.measured |= asdict(statistics.reached[name])
            projections[p.name] = quantized
        return cls(index, layout, projections, statistics.magnitudes, statistics.tokens)

    def of_group(self, group: InputGroup) -> list[QuantizedProjection]:
        """Return the quantized projections that see one input."""
        return [self.projections[p.name] for p in group.projections if not p.kept]

    @contextmanager
    def naming(self, p: QuantizedProjection) -> Iterator[None]:
        """Put the names of block and projection into a numerical error of this context."""
        try:
            yield
        except NumericalError as error:
            raise NumericalError(f"block {self.index}, {p.projection.name}: {error}") from error

    def damp(self, damping: Damping, growth: float = 1) -> None:
        """Damp all Hessians with a share of their mean diagonal, times a factor."""
        for p in {id(p.hessian): p for p in self.projections.values()}.values():
            p.hessian.damp(growth * damping_for(damping, p.weight.shape[-1], self._tokens_of(p)))

    def clear_dead_columns(self) -> None:
        """Aim at 0 for the weights of inputs that are always 0: any other value would only cost range.

        Of fewer tokens than inputs many are 0 by chance, behind a ReLU; their weights stay.
        """
        for p in self.projections.values():
            dead = p.hessian.dead[:, None]  # [heads or 1, 1, d_in]
            if self._tokens_of(p) >= p.weight.shape[-1] and bool(dead.any()):
                p.weight = p.weight.masked_fill(dead, 0)

    def _tokens_of(self, projection: QuantizedProjection) -> int:
        """Return the number of tokens in a projection's Hessian: all, or those of an expert."""
        return int(projection.measured.get("tokens", self.tokens))

    def zetas(self) -> Mapping[str, Tensor]:
        """Return zeta ``[d_in]`` of each input group that folds it somewhere."""
        groups = (group for group in self.layout.groups if group.fold is not None)
        return {group.name: self.of_group(group)[0].grid.zeta for group in groups}

    def stored(self) -> dict[str, StoredWeight]:
        """Return the weights as they are stored, by projection."""
        return {name: p.stored() for name, p in self.projections.items()}

    def take_grids(self, grids: Mapping[str, Grid]) -> None:
        """Take the grids of all projections, and nearest rounding on them.

        Scales are rounded so that float16 holds them after the next group's zeta is folded into the
        rows: the export is exact, and the integers are chosen for the scales that it has.
        """
        for group in self.layout.groups:
            if isinstance(group.fold, FoldIntoRows):
                before = self.projections[group.fold.projection]
                zeta = grids[group.projections[0].name].zeta
                before.row_factor = zeta.view(before.weight.shape[:2])
        for name, grid in grids.items():
            p = self.projections[name]
            p.grid, p.updated = grid.in_half(p.row_factor), None
            p.integers = quantize(p.weight, p.grid).to(torch.uint8)
            release_memory()  # small integers would else break up what larger tensors leave


def grid_format(settings: QuantizationSettings, block: int, projection: str) -> GridFormat:
    """Return the format of the grids of a projection, given the number of its block."""
    kind = settings.type_for(block, projection)
    if kind is not None:
        return GridFormat.of(TYPES[kind])
    bits = settings.bits_for(block, projection)
    return GridFormat(bits, settings.symmetric, settings.group_size)


def nearest_weight(
    module: nn.Module, layout: BlockLayout, projection: Projection, form: GridFormat
) -> Tensor:
    """Return round-to-nearest on the min-max grid, ``[rows, d_in]``: the usual thing to compare with."""
    W = projection_weight(module, layout, projection).float()[None]
    grid = min_max_grid(W, torch.ones_like(W[0, 0]), form)
    return dequantize(quantize(W, grid), grid)[0]
