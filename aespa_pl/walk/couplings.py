"""See, before the walk, how the end loss couples the rows of each projection; keep it until a block is done.

The gradients come from the end of the model, so all blocks are looked at before the first is quantized.
Their matrices wait in the run's folder, in half precision. A run that is continued reads them, or computes
them again where some are missing.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from aespa_pl.algorithm.hessian import damped
from aespa_pl.calibration.end_loss import couplings, segments_of
from aespa_pl.errors import UserError
from aespa_pl.run.context import Context
from aespa_pl.storage.files import has_tensors, read_tensors, write_tensors

SEED = 0
DAMPING = 0.2
"""Part of its mean diagonal that is added to the diagonal of a G; 0.02 to 0.5 are level."""


def prepare(context: Context, tokens: Tensor, missing: Collection[int]) -> None:
    """Write the matrices of blocks that are to be quantized, from calibration segments ``[segments, L]``."""
    run = context.run
    if all(has_tensors(run.coupling_file(index)) for index in missing):
        return
    count, segments = context.source.block_count, tokens[: segments_of(tokens.shape[1])]
    context.progress.begin("Looking at the end loss, blocks", count)
    layouts = [context.layout(index) for index in range(count)]
    for index, found in couplings(context.source, segments, layouts, seed=SEED):
        if index in missing:
            write_tensors(run.coupling_file(index), found, {})
        context.progress.advance()


def read(context: Context, index: int) -> dict[str, Tensor]:
    """Return the matrices ``[heads, rows, rows]`` of a block by projection, damped, in float32 on the device.

    Raises UserError where one is not finite, because the file was damaged.
    """
    file = context.run.coupling_file(index)
    stored = read_tensors(file)
    if wrong := [name for name, G in stored.items() if not G.isfinite().all()]:
        raise UserError(f"{file} is damaged ({', '.join(wrong)}): remove it, and continue the run")
    return {name: damped(G.to(context.device, torch.float32), DAMPING) for name, G in stored.items()}
