"""Quantize embedding and head where a format of llama.cpp has a block type for them.

The head, or the embedding that is the head as well, is rounded as the projections are: by OPTQ and coordinate
descent under the second moment H of its inputs in the original model. An embedding that is no head is rounded
row by row.
"""

from dataclasses import replace

import torch
from safetensors.torch import load_file
from torch import Tensor

from aespa_pl.algorithm.grid import search_grid
from aespa_pl.algorithm.grid_types import TYPES, GridType, TypedWeight
from aespa_pl.algorithm.hessian import damp, damping_for
from aespa_pl.algorithm.quantizer import GridFormat, quantize
from aespa_pl.algorithm.refit import rounded_rows
from aespa_pl.block.integers import descend_rows, updated_rows
from aespa_pl.block.quantize import ADVICE
from aespa_pl.block.quantized import Rows
from aespa_pl.calibration.end_loss import LENGTH, SEGMENTS, TIED_DAMPING, head_input
from aespa_pl.errors import NumericalError, UserError
from aespa_pl.models.pretrained import refuse_unusable
from aespa_pl.run.context import Context
from aespa_pl.storage.files import write_tensors

ROWS = 4096  # that are rounded together
EXACT_BITS = 8
"""Bits from which on nearest rounding is enough. OPTQ takes what SmolLM2's head, its embedding, adds to the
end loss from 0.014 to 0.002 nats in Q5_1; in Q8_0 the whole is 0.0003."""


def quantize_stem(context: Context, tokens: Tensor) -> None:
    """Write the numbers of embedding and head to their file, where they have types and it isn't whole.

    Raises UserError where activations overflow.
    """
    # the blocks are quantized after this embedding; the calibration segments ``[segments, L]`` are the head's
    pretrained = context.source.pretrained
    types, parts = _types(context), pretrained.embeddings()
    if not types or context.run.has_stem:
        return
    head, tied = parts.get("head", parts["embedding"]), "head" not in parts
    numbers: dict[str, Tensor] = {}
    for name, kind in types.items():
        W, H = pretrained.mapped(name), None
        if name == head and context.settings.optq.enabled and kind.bits < EXACT_BITS:
            H = head_input(context.source, tokens[:SEGMENTS, :LENGTH])[None]  # [1, d, d]
            of_text = damping_for(context.settings.damping, W.shape[1], tokens[:SEGMENTS, :LENGTH].numel())
            share = TIED_DAMPING if tied else of_text
            H.diagonal(dim1=1, dim2=2).copy_(damp(H.diagonal(dim1=1, dim2=2), share))
        try:
            pieces, found = W.split(ROWS), list[TypedWeight]()
            context.progress.begin(f"Rounding {name}, parts", len(pieces))
            for piece in pieces:
                refuse_unusable(name, pretrained.tensors[name].file, piece, piece)
                rows = piece.to(context.device)
                found.append(rounded_rows(rows, kind) if H is None else _compensated(context, rows, H, kind))
                context.progress.advance()
        except NumericalError as error:
            raise UserError(f"{name}: {error}; {ADVICE}") from error
        of_pieces = [piece.tensors() for piece in found]
        for field in of_pieces[0]:
            numbers[f"{name}.{field}"] = torch.cat([piece[field].cpu() for piece in of_pieces])
    write_tensors(context.run.stem_file, numbers, {})
    context.run.finish_stem()


def stem_tensors(context: Context) -> dict[str, Tensor]:
    """Return what the run's model has outside its blocks, rounded to the types of the original's file."""
    pretrained = context.source.pretrained
    tensors = {
        n: pretrained.mapped(n) if n in pretrained.tables else pretrained.tensor(n)
        for n in pretrained.stem_names()
    }
    if types := _types(context):
        stored = load_file(context.run.stem_file)
        for name, kind in types.items():
            weight = torch.empty_like(tensors.pop(name))
            for rows, part in zip(
                weight.split(ROWS), TypedWeight.read(stored, name, kind).split(ROWS), strict=True
            ):
                rows.copy_(part.weight())
            tensors[name] = weight
    return tensors


def _types(context: Context) -> dict[str, GridType]:
    """Return the block types of embedding and head, by the name of the weight."""
    parts, types = context.source.pretrained.embeddings(), context.settings.types
    return {name: TYPES[types[part]] for part, name in parts.items() if part in types}


def _compensated(context: Context, W: Tensor, H: Tensor, kind: GridType) -> TypedWeight:
    """Return rows of the head in a type, by the steps that projections take."""
    weight, factor = W[None].float(), torch.ones(1, len(W), device=W.device)
    zeta = torch.ones(W.shape[1], device=W.device)
    grid = search_grid(weight, H, zeta, GridFormat.of(kind))[0].in_half(factor)
    rows = Rows(weight, grid, quantize(weight, grid), factor, H, None)
    _, q, grid, _ = updated_rows(rows)
    if context.settings.polish.enabled:
        found, grid = descend_rows(replace(rows, integers=q, grid=grid), context.settings.polish.passes)
        q = found.integers
    if grid.factors is None:
        raise ValueError(f"{kind.name} makes no grid")
    return grid.factors.stored(q[0].to(torch.uint8))
