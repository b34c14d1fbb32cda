"""See, before the walk, how the end loss couples the rows of each projection; keep it until a block is done.

The gradients come from the end of the model, so all blocks are looked at before the first is quantized.
Their matrices wait in the run's folder, in half precision. A run that is continued reads them, or computes
them again where some are missing.
"""

import shutil
from collections.abc import Collection

import torch
from torch import Tensor

from aespa_pl.calibration.end_loss import couplings, segments_of
from aespa_pl.run.context import Context
from aespa_pl.storage.files import has_tensors, read_tensors, write_tensors

SEED = 0


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
            write_tensors(run.coupling_file(index), {name: G.half() for name, G in found.items()}, {})
        context.progress.advance()


def read(context: Context, index: int) -> dict[str, Tensor]:
    """Return the matrices ``[heads, rows, rows]`` of a block by projection, in float32 on the device."""
    stored = read_tensors(context.run.coupling_file(index))
    return {name: G.to(context.device, torch.float32) for name, G in stored.items()}


def forget(context: Context, index: int) -> None:
    """Remove the matrices of a block that is complete."""
    context.run.coupling_file(index).unlink(missing_ok=True)


def forget_all(context: Context) -> None:
    """Remove what a process that was killed may have left."""
    shutil.rmtree(context.run.couplings_folder, ignore_errors=True)
