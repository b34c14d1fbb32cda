"""Steps 2 and 3 of a block: statistics and weights in, grids and the start of the rounding out.

Source: algorithm.md, steps 2 and 3.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from aespa_pl.algorithm.correction import corrected_weights
from aespa_pl.algorithm.grid import min_max_grid
from aespa_pl.algorithm.hessian import HeadMatrices, damp
from aespa_pl.algorithm.objectives import reconstruction_loss
from aespa_pl.algorithm.optq import update_weights
from aespa_pl.algorithm.quantizer import Grid, dequantize, quantize, round_to_half
from aespa_pl.algorithm.zfold import fit_grids, search_with_loss
from aespa_pl.calibration.statistics import BlockStatisticTensors
from aespa_pl.distributed.processes import ALONE, Ranks
from aespa_pl.distributed.rows import Shard
from aespa_pl.models.family import BlockLayout, FoldIntoRows, InputGroup, Projection, Role
from aespa_pl.models.weights import projection_weight
from aespa_pl.settings import QuantizationSettings
from aespa_pl.storage.head_matrices import HeadsOnDisk


@dataclass(frozen=True)
class PreparedProjection:
    """One projection, ready for rounding."""

    projection: Projection
    weight: Tensor
    """What is quantized, ``[heads, rows, d_in]``, float32: the original weight, or with input_correction
    the one that makes up for the errors of earlier blocks; columns of dead inputs are 0."""
    hessian: Tensor | HeadMatrices
    """Damped, ``[heads or 1, d_in, d_in]``."""
    other_side: Tensor | None
    """G ``[heads, d_h, d_h]`` of the query and key projections' objective."""
    grid: Grid
    """Before folding."""
    export_scale: Tensor
    """``[heads, rows, groups]``: scale after the next group's zeta is folded into the rows; every
    value fits float16."""
    updated: Tensor
    """OPTQ's W': the weights at the moment they were about to be rounded."""
    integers: Tensor
    """What OPTQ (or nearest rounding, with OPTQ off) chose, uint8."""
    extra_damping: float
    """Share of the mean diagonal that OPTQ's factorization needed beyond the setting."""

    @property
    def damped(self) -> Tensor:
        """The Hessian, in memory."""
        return self.hessian[:]

    def of_heads(self, first: int, end: int) -> "PreparedProjection":
        """Return what concerns some heads; their Hessians are in memory then."""
        return replace(
            self,
            weight=self.weight[first:end],
            hessian=self.damped if self.hessian.shape[0] == 1 else self.hessian[first:end],
            other_side=None if self.other_side is None else self.other_side[first:end],
            grid=self.grid.heads(first, end - first),
            export_scale=self.export_scale[first:end],
            updated=self.updated[first:end],
            integers=self.integers[first:end],
        )

    def loss(self, integers: Tensor) -> Tensor:
        """Return the exact objective of ``integers`` in its independent parts (see objectives)."""
        error = dequantize(integers, self.grid) - self.weight
        return reconstruction_loss(error, self.hessian, self.other_side)


def head_count(layout: BlockLayout, projection: Projection) -> int:
    """Return the number of heads that the rows of a projection are split into: 1 where none matter."""
    if projection.role is Role.QUERY:
        return layout.heads
    return 1 if projection.role is Role.OTHER else layout.key_value_heads


@dataclass(frozen=True)
class BlockProblem:
    """Weights and damped Hessians of a block, by projection name; shapes as in PreparedProjection."""

    layout: BlockLayout
    weights: Mapping[str, Tensor]
    hessians: Mapping[str, Tensor | HeadMatrices]
    statistics: BlockStatisticTensors


def state_problem(
    block: nn.Module,
    layout: BlockLayout,
    statistics: BlockStatisticTensors,
    damping: float,
    targets: Mapping[str, Tensor] | None = None,
) -> BlockProblem:
    """Bring weights and statistics of a block into the shapes of ``algorithm/``.

    The Hessians of the statistics are damped in place, for a copy would take as much memory as they
    do; a second call starts from what they were.

    Args:
        block: With its original weights.
        layout: Of the block.
        statistics: Of the block.
        damping: Share of its mean diagonal that is added to the diagonal of each Hessian.
        targets: Weights by name, in the shape of those of the result; None: the block's own.
    """
    weights, hessians = {}, {}
    for group in layout.groups:
        for p in group.projections:
            H, raw = _damped(p, group, statistics, damping)
            hessians[p.name] = H
            W = _weight(block, layout, p) if targets is None else targets[p.name]
            dead = raw == 0
            weights[p.name] = W.masked_fill(dead[:, None], 0) if bool(dead.any()) else W
    return BlockProblem(layout, weights, hessians, statistics)


def corrected_targets(
    block: nn.Module,
    layout: BlockLayout,
    statistics: BlockStatisticTensors,
    damping: float,
    share: float,
) -> dict[str, Tensor]:
    """Return the weights that make up for a share of the errors of earlier blocks.

    The Hessians of the statistics are damped in place, as by ``state_problem``.

    Args:
        block: With its original weights.
        layout: Of the block.
        statistics: Of the block, with the shifts.
        damping: As for ``state_problem``.
        share: alpha, see ``algorithm/correction.py``.

    Raises:
        ArithmeticError: A Hessian cannot be factored; the message names the projection.
    """
    targets = {}
    for group in layout.groups:
        for p in group.projections:
            H, _ = _damped(p, group, statistics, damping)
            residual = statistics.residual_shifts.get(group.name)
            with _naming(p):
                targets[p.name] = corrected_weights(
                    _weight(block, layout, p),
                    _shift(p, group, statistics),
                    H,
                    share,
                    None if residual is None else residual[None],
                )
    return targets


def fit_block_grids(
    problem: BlockProblem, settings: QuantizationSettings, ranks: Ranks = ALONE
) -> dict[str, Grid]:
    """Run step 2: the grids of all projections, the input groups one after the other."""
    grids: dict[str, Grid] = {}
    for group in problem.layout.groups:
        names = [p.name for p in group.projections]
        fitted = fit_grids(
            [problem.weights[name] for name in names],
            [problem.hessians[name] for name in names],
            bits=settings.bits,
            symmetric=settings.symmetric,
            group_size=settings.group_size,
            with_zeta=settings.grid.zfold and group.fold is not None,
            max_rounds=settings.grid.max_rounds,
            search_one=partial(_search_part, ranks),
        )
        grids |= dict(zip(names, fitted, strict=True))
    return grids


def prepare_rounding(
    problem: BlockProblem,
    grids: Mapping[str, Grid],
    settings: QuantizationSettings,
    ranks: Ranks = ALONE,
) -> dict[str, PreparedProjection]:
    """Round the scales to what float16 holds, and run step 3.

    Raises:
        ArithmeticError: A Hessian cannot be factored; the message names the projection.
    """
    factors = _row_factors(problem.layout, grids)
    return {
        p.name: _prepare(
            p,
            problem.weights[p.name],
            problem.hessians[p.name],
            _other_side(p, problem.statistics),
            grids[p.name],
            row_factor=factors.get(p.name),
            use_optq=settings.optq.enabled,
            ranks=ranks,
        )
        for p in problem.layout.projections
    }


def group_zetas(
    layout: BlockLayout, prepared: Mapping[str, PreparedProjection]
) -> dict[str, Tensor]:
    """Return zeta ``[d_in]`` of each input group that folds it somewhere."""
    return {
        group.name: prepared[group.projections[0].name].grid.zeta
        for group in layout.groups
        if group.fold is not None
    }


def nearest_weight(
    block: nn.Module, layout: BlockLayout, projection: Projection, settings: QuantizationSettings
) -> Tensor:
    """Return round-to-nearest on the min-max grid, ``[rows, d_in]``: what aespa is compared with."""
    W = projection_weight(block, layout, projection).float()[None]
    grid = min_max_grid(
        W,
        torch.ones_like(W[0, 0]),
        bits=settings.bits,
        symmetric=settings.symmetric,
        group_size=settings.group_size,
    )
    return dequantize(quantize(W, grid), grid)[0]


def _weight(block: nn.Module, layout: BlockLayout, projection: Projection) -> Tensor:
    """Return a projection's weight ``[heads, rows, d_in]`` in float32; it may be the block's own."""
    weight: Tensor = projection_weight(block, layout, projection).float()
    return weight.view(head_count(layout, projection), -1, weight.shape[-1])


def _damped(
    projection: Projection, group: InputGroup, statistics: BlockStatisticTensors, damping: float
) -> tuple[Tensor | HeadsOnDisk, Tensor]:
    """Return a projection's Hessian, damped in place where it is in memory, and its diagonal before."""
    name = group.name
    H: Tensor | HeadsOnDisk = statistics.inputs[group.name][None]
    if projection.role is Role.VALUE and statistics.attended is not None:
        name, H = f"{group.name} of values", statistics.attended
    if isinstance(H, HeadsOnDisk):
        raw = H.diagonal()
        return replace(H, diagonals=damp(raw, damping)), raw
    diagonal = H.diagonal(dim1=-2, dim2=-1)  # a view
    raw = statistics.diagonals.setdefault(name, diagonal.clone())
    diagonal.copy_(damp(raw, damping))
    return H, raw


def _shift(
    projection: Projection, group: InputGroup, statistics: BlockStatisticTensors
) -> Tensor | HeadsOnDisk:
    if projection.role is Role.VALUE and statistics.attended_shift is not None:
        return statistics.attended_shift
    return statistics.shifts[group.name][None]


@contextmanager
def _naming(projection: Projection) -> Iterator[None]:
    """Put the name of the projection into what goes wrong with its numbers."""
    try:
        yield
    except ArithmeticError as error:
        raise ArithmeticError(f"{projection.name}: {error}") from error


def _other_side(projection: Projection, statistics: BlockStatisticTensors) -> Tensor | None:
    if projection.role is Role.QUERY:
        return statistics.keys
    return statistics.queries if projection.role is Role.KEY else None


def _row_factors(layout: BlockLayout, grids: Mapping[str, Grid]) -> dict[str, Tensor]:
    """Return, by projection, the zeta ``[rows]`` of the next group that is folded into its rows."""
    return {
        group.fold.projection: grids[group.projections[0].name].zeta
        for group in layout.groups
        if isinstance(group.fold, FoldIntoRows)
    }


def _search_part(
    ranks: Ranks, W: Tensor, H: Tensor, zeta: Tensor, **options: Any
) -> tuple[Grid, float]:
    """Search the grids of this process's rows; return that of all rows, and its loss."""
    shard = Shard.of(W, H, None, ranks)
    part, loss = search_with_loss(shard.part(W), shard.hessians(H), zeta, **options)
    return shard.whole_grid(part), shard.sum(loss)


def _prepare(
    projection: Projection,
    W: Tensor,
    H: Tensor | HeadMatrices,
    G: Tensor | None,
    fitted: Grid,
    *,
    row_factor: Tensor | None,
    use_optq: bool,
    ranks: Ranks,
) -> PreparedProjection:
    factor = W.new_ones(W.shape[:2]) if row_factor is None else row_factor.view(W.shape[:2])
    export_scale = round_to_half(fitted.scale * factor[..., None])
    grid = Grid(export_scale / factor[..., None], fitted.zero_point, fitted.zeta, fitted.bits)
    updated, integers, extra_damping = W, quantize(W, grid), 0.0
    if use_optq:
        shard = Shard.of(W, H, None, ranks)
        with _naming(projection), ranks.failing_together():
            updated, integers, extra_damping = update_weights(
                shard.part(W), shard.hessians(H), shard.grid(grid)
            )
        updated, integers = shard.whole(updated), shard.whole(integers.to(torch.uint8))
        extra_damping = ranks.largest(extra_damping)
    return PreparedProjection(
        projection, W, H, G, grid, export_scale, updated, integers.to(torch.uint8), extra_damping
    )
