"""Run the steps of one block in their order, from weights and statistics to integers."""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aespa_pl.algorithm.hessian import LEAST_DAMPING, corrected_weights
from aespa_pl.block.grids import fit_grids
from aespa_pl.block.integers import polish, update
from aespa_pl.block.learn import Learner
from aespa_pl.block.quantized import QuantizedBlock, QuantizedProjection
from aespa_pl.calibration.statistics import BlockStatistics, Shifts
from aespa_pl.errors import NumericalError, UserError
from aespa_pl.models.family import Role
from aespa_pl.run.context import Context

DAMPING_GROWTH = 10
"""Factor of the damping in the second attempt at a block whose loss was not finite."""
ADVICE = "check the model and data.calibration.source, or try another quantization.damping in a new run"
"""What to do about a NumericalError that a second attempt doesn't mend."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BlockQuantizer:
    """Runs the steps of one block after the other."""

    context: Context

    def start(self, index: int, module: nn.Module, statistics: BlockStatistics) -> QuantizedBlock:
        """Return a block without grids, aimed at weights that make up for earlier blocks' errors.

        ``module`` has the original weights. The Hessians of ``statistics`` become the quantized block's; the
        rest is not needed afterwards. Raises UserError where a Hessian cannot be factored.
        """
        settings, layout = self.context.settings, self.context.layout(index)
        block = QuantizedBlock.begin(index, module, layout, statistics, settings)
        block.damp(settings.damping)
        if statistics.shifts is not None:
            with self.context.measure("correction"):
                try:
                    correct(block, statistics.shifts, settings.input_correction or 0.0)
                except NumericalError as error:
                    raise UserError(f"{error}; {ADVICE}") from error
        if settings.uses_inputs:
            block.clear_dead_columns()
        return block

    def quantize(self, block: QuantizedBlock) -> None:
        """Run steps 2 to 4 and the polish; raise UserError if ten times the damping gives no finite loss."""
        context, settings = self.context, self.context.settings
        first = LEAST_DAMPING if settings.damping == "auto" else settings.damping
        damping = context.run.damping.get(block.index, first)
        while True:
            block.damp(settings.damping, damping / first)
            try:
                with context.measure("grid"):
                    fit_grids(block, settings, context.world)
                self._update(block, damping / first)
                with context.measure("rounding"):
                    Learner(context).learn(block)
                break
            except NumericalError as error:
                stronger = DAMPING_GROWTH * damping
                if damping != first or stronger >= 1:  # there is no third attempt
                    raise UserError(f"{error}; {ADVICE}") from error
                log.warning("%s; again with %d times the damping", error, DAMPING_GROWTH)
                context.run.damp_again(block.index, stronger)
                damping = stronger
        block.damp(settings.damping)  # all blocks' losses are measured alike
        if settings.polish.enabled:
            with context.measure("polish"):
                polish(block, settings.polish.passes, context.world)

    def _update(self, block: QuantizedBlock, growth: float) -> None:
        optq = self.context.settings.optq
        if optq.enabled:
            with self.context.measure("optq"):
                update(block, self.context.world, rows=bool(optq.rows))
        block.damp(self.context.settings.damping)
        for p in block.projections.values():
            p.measured["optq"] = float(p.loss(p.integers).sum())
        block.damp(self.context.settings.damping, growth)


def correct(block: QuantizedBlock, shifts: Shifts, share: float) -> None:
    """Before step 2, let the weights that a block aims at make up for a share of earlier blocks' errors.

    The share alpha, 0 to 1, is that of the shifts; the block's Hessians are damped. Raises NumericalError,
    with the name of the projection, where one cannot be factored.

    Source: docs/algorithm.md and docs/correction.md; not in the paper.
    """
    for group in block.layout.groups:
        for name, projections in group.inputs.items():
            for p in (block.projections[p.name] for p in projections if not p.kept):
                with block.naming(p):
                    p.weight = _corrected(p, name, shifts, share)


def _corrected(p: QuantizedProjection, name: str, shifts: Shifts, share: float) -> Tensor:
    if p.projection.role is Role.VALUE and shifts.attended is not None:
        shift = shifts.attended
    elif name in shifts.outputs:
        shift = shifts.outputs[name].view_as(p.weight)
    else:
        shift = p.weight @ shifts.inputs[name]
    slices = [slice(None)] if p.hessian.in_memory else [slice(h, h + 1) for h in range(p.heads)]
    found = [corrected_weights(p.weight[s], shift[s], p.hessian[s], share) for s in slices]
    weights, added = zip(*found, strict=True)
    p.measured["correction_damping"] = float(torch.cat(added).max())
    return torch.cat(weights)
