"""Take projections out of a block, put them back, and fold zeta into what comes before them.

Source: docs/algorithm.md, step 2; Z-Fold is in Sections 3.4 and 4.1 of the paper.
"""

from collections.abc import Mapping
from typing import cast

from torch import Tensor, nn

from aespa_pl.models.family import BlockLayout, FoldIntoNorm, FoldIntoRows, Projection


def projection_weight(block: nn.Module, layout: BlockLayout, projection: Projection) -> Tensor:
    """Return the weight ``[rows, d_in]``: the block's own, or a copy if its rows are gathered."""
    weight = _linear(block, projection).weight.detach()
    return projection_rows(weight, layout, projection).flatten(0, 1)


def set_projection_weight(
    block: nn.Module, layout: BlockLayout, projection: Projection, weight: Tensor
) -> None:
    """Write a weight ``[rows, d_in]`` into the block, in the block's own type."""
    target = projection_rows(_linear(block, projection).weight.detach(), layout, projection)
    target.copy_(weight.view(target.shape))


def fold(block: nn.Module, layout: BlockLayout, zeta: Mapping[str, Tensor]) -> None:
    """Move zeta from the columns of projections into what comes before; the output stays the same.

    The block is changed in place. Zeta has positive factors ``[d_in]`` by the name of the input group. Column
    and row scalings commute, so the groups may be folded in any order. ValueError is raised where a zeta is
    not positive, or its group has no fold.
    """
    groups = {group.name: group for group in layout.groups}
    projections = {projection.name: projection for projection in layout.projections}
    for name, factor in zeta.items():
        if not bool((factor > 0).all()):
            raise ValueError(f"zeta of {name} must be positive")  # relu(-x) is not -relu(x)
        for projection in groups[name].projections:
            weight = _linear(block, projection).weight.detach()
            projection_rows(weight, layout, projection).div_(factor.to(weight.device))
        match groups[name].fold:
            case FoldIntoNorm(module, offset, readers):
                for reader in readers:
                    weight = block.get_parameter(f"{reader}.weight").detach()
                    weight.div_(factor.to(weight.device))
                norm = block.get_submodule(module)
                for parameter in norm.parameters(recurse=False):  # weight, bias where there is one
                    value = parameter.detach()
                    value.add_(offset).mul_(factor.to(value.device)).sub_(offset)
            case FoldIntoRows(before):
                for parameter in _linear(block, projections[before]).parameters(recurse=False):
                    rows = projection_rows(parameter.detach(), layout, projections[before])
                    # [heads, d_head, ...]; a bias has no columns
                    rows.mul_(factor.to(rows.device).view(*rows.shape[:2], *[1] * (rows.dim() - 2)))
            case None:
                raise ValueError(f"zeta of {name} has nowhere to go")


def projection_rows(tensor: Tensor, layout: BlockLayout, projection: Projection) -> Tensor:
    """Return the projection's rows of its module's weight or bias: a view ``[heads, d_head, ...]``.

    A projection with a module, or a block of rows, of its own counts as one head.
    """
    if projection.rows is not None:
        return tensor[slice(*projection.rows)][None]
    index, fused = projection.fused
    rows = tensor.shape[0] if fused == 1 else layout.head_dim
    return tensor.view(-1, fused, rows, *tensor.shape[1:])[:, index]


def _linear(block: nn.Module, projection: Projection) -> nn.Linear:
    return cast(nn.Linear, block.get_submodule(projection.module))
