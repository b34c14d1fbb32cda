"""Before step 2, let the weights make up for a share of the errors of earlier blocks.

Source: docs/algorithm.md and docs/correction.md; not in the paper.
"""

import torch
from torch import Tensor

from aespa_pl.algorithm.hessian import corrected_weights
from aespa_pl.block.errors import naming
from aespa_pl.block.quantized import QuantizedBlock, QuantizedProjection
from aespa_pl.calibration.statistics import Shifts
from aespa_pl.models.family import Role


def correct(block: QuantizedBlock, shifts: Shifts, share: float) -> None:
    """Replace the weights that the block aims at.

    Args:
        block: The block, with damped Hessians.
        shifts: How inputs and outputs differ from the original model's.
        share: Share alpha of the difference that is made up for, 0 to 1.

    Raises:
        NumericalError: A Hessian cannot be factored; the message names the projection.
    """
    for group in block.layout.groups:
        for name, projections in group.inputs.items():
            for p in (block.projections[p.name] for p in projections if not p.kept):
                with naming(block, p):
                    p.weight = _corrected(p, name, shifts, share)


def _corrected(p: QuantizedProjection, name: str, shifts: Shifts, share: float) -> Tensor:
    """Return the weight that a share of the shifts is made up for with; ``name`` is its input's."""
    if p.projection.role is Role.VALUE and shifts.attended is not None:
        shift = shifts.attended
    elif name in shifts.outputs:
        shift = shifts.outputs[name].view_as(p.weight)
    else:
        shift = p.weight @ shifts.inputs[name]
    slices = [slice(None)] if p.hessian.in_memory else _single_heads(p.heads)
    found = [corrected_weights(p.weight[s], shift[s], p.hessian[s], share) for s in slices]
    weights, added = zip(*found, strict=True)
    p.measured["correction_damping"] = float(torch.cat(added).max())
    return torch.cat(weights)


def _single_heads(heads: int) -> list[slice]:
    return [slice(h, h + 1) for h in range(heads)]
