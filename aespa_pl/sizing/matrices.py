"""List the matrices of a model with their candidates, and the bytes and the end loss of each.

A candidate is a block type of llama.cpp, or the bits of uniform grids.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aespa_pl.algorithm.end_loss import predicted, uncompensated, uncorrected
from aespa_pl.algorithm.grid_types import TYPES
from aespa_pl.algorithm.hessian import damping_for
from aespa_pl.algorithm.quantizer import GridFormat
from aespa_pl.calibration.end_loss import LENGTH, SEGMENTS, end_loss
from aespa_pl.errors import UserError
from aespa_pl.export.gguf_bytes import BLOCK_TYPES, padded
from aespa_pl.models.family import BlockLayout
from aespa_pl.models.streamed import StreamedModel
from aespa_pl.planning.shape import Shape
from aespa_pl.settings import QuantizationSettings

WIDE = ("Q2_K", "Q3_K", "IQ4_XS", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
NARROW = ("Q2_0", "IQ4_NL", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""Candidates for rows that are whole blocks of 256 columns, and for others."""
BITS = tuple(str(bits) for bits in range(2, 9))
ENDS = ("embedding", "head")
ROWS = 256
"""Rows of a matrix that are rounded for the prediction; they stand for all."""
SEED = 0
"""Seed of the labels."""
SCALE_BITS = 16
"""Scales of uniform grids are float16; a zero point, which symmetric ones don't have, has a weight's bits."""


@dataclass(frozen=True)
class SizedMatrix:
    """Holds a matrix of the file and the bytes that it has in each candidate."""

    keys: tuple[str, ...]
    """``BLOCK.PROJECTION`` of all projections in it, ``embedding``, ``head`` or another embedding's name."""
    weights: int
    costs: Mapping[str, int]
    """Bytes by candidate: the name of a block type, or bits."""


def fitting_types(columns: int) -> tuple[str, ...]:
    """Return the block types for a row of so many columns, of which each is a candidate."""
    types = WIDE if TYPES[WIDE[0]].fits(columns) else NARROW
    return tuple(kind for kind in types if TYPES[kind].fits(columns))


def packed_bits(weights: int, columns: int, kind: str, settings: QuantizationSettings) -> float:
    """Return the bits of a matrix with its scales and zero points, given its block type or its bits."""
    if kind in BLOCK_TYPES:
        return weights * BLOCK_TYPES[kind].bits
    of_group = SCALE_BITS + (0 if settings.symmetric else int(kind))
    return weights * int(kind) + weights // (settings.group_size or columns) * of_group


def typed_matrices(
    layouts: tuple[BlockLayout, ...],
    shape: Shape,
    fixed: Mapping[str, str],
    *,
    tied: bool,
    candidates: Callable[[int], tuple[str, ...]] = fitting_types,
) -> list[SizedMatrix]:
    """Return every matrix with the block types that ``candidates`` returns for its columns.

    ``fixed`` are types that the user has chosen, by the keys of ``SizedMatrix``; ``tied``: without a head.
    """

    def sized(keys: tuple[str, ...], rows: int, columns: int) -> SizedMatrix:
        types = _fixed(keys, fixed) or candidates(columns)
        costs = {k: padded(int(rows * columns * BLOCK_TYPES[k].bits / 8)) for k in types}
        return SizedMatrix(keys, rows * columns, costs)

    found = [sized((end,), shape.vocabulary, shape.hidden) for end in (ENDS[:1] if tied else ENDS)]
    found += [sized((name,), *size) for name, size in shape.tables.items()]
    return found + [sized(*each) for each in _in_blocks(layouts, shape)]


def uniform_matrices(
    layouts: tuple[BlockLayout, ...], shape: Shape, settings: QuantizationSettings, fixed: Mapping[str, str]
) -> list[SizedMatrix]:
    """Return the matrices of the blocks with each number of bits; arguments as above."""

    def sized(keys: tuple[str, ...], rows: int, columns: int) -> SizedMatrix:
        bits = _fixed(keys, fixed) or BITS
        costs = {b: math.ceil(packed_bits(rows * columns, columns, b, settings) / 8) for b in bits}
        return SizedMatrix(keys, rows * columns, costs)

    return [sized(*each) for each in _in_blocks(layouts, shape)]


def _fixed(keys: tuple[str, ...], fixed: Mapping[str, str]) -> tuple[str, ...]:
    """Return the candidate that the user has chosen for a matrix; nothing where there is a choice.

    Raises UserError where that is said of a part of the matrix, or of some experts.
    """
    chosen = {fixed.get(key) for key in keys}
    if len(chosen) > 1:
        named = ", ".join(f"{key}: {fixed[key]}" for key in keys if key in fixed)
        raise UserError(
            f"quantization.bits_of or types has {named}, but quantization.target chooses for {keys[0]} to "
            f"{keys[-1]} together: name all of them with the same, or none"
        )
    return tuple(kind for kind in chosen if kind is not None)


def _in_blocks(layouts: tuple[BlockLayout, ...], shape: Shape) -> list[tuple[tuple[str, ...], int, int]]:
    """Return keys, rows and columns of the matrices of all blocks; all experts of one have the same."""
    found = []
    for block, layout in enumerate(layouts):
        of_module: dict[str, list[str]] = {}
        for p in layout.projections:
            of_expert = layout.mixture is not None and p.module.startswith(f"{layout.mixture.experts}.")
            module = p.module.rpartition(".")[2] if of_expert else p.module
            of_module.setdefault(module, []).append(p.name)
        for names in of_module.values():
            each = [shape.of_blocks[block][name] for name in names]
            keys = tuple(f"{block}.{name}" for name in names)
            found.append((keys, sum(m.rows for m in each), each[0].columns))
    return found


def predicted_losses(
    source: StreamedModel,
    tokens: Tensor,
    matrices: Sequence[SizedMatrix],
    settings: QuantizationSettings,
    after: Callable[[], None] = lambda: None,
) -> list[dict[str, float]]:
    """Return the predicted rise of the end loss, in nats per token, of each matrix by candidate.

    A few of the segments ``tokens``, ``[segments, L]``, are used; ``after`` is called after each projection.
    """
    losses = [dict.fromkeys(m.costs, 0.0) for m in matrices]
    of_key = {key: of for m, of in zip(matrices, losses, strict=True) for key in m.keys}
    tied = "head" not in of_key
    inputs, D = None, torch.empty(0)  # of the group under way
    for seen in end_loss(source, tokens[:SEGMENTS, :LENGTH], seed=SEED):
        key = seen.name if seen.block is None else f"{seen.block}.{seen.name}"
        key = "embedding" if key == "head" and tied else key
        if key in of_key:
            if seen.inputs is None:  # of an embedding, which is rounded without compensation
                D = torch.ones(seen.weight.shape[1], device=seen.weight.device)
            elif seen.inputs is not inputs:
                if settings.optq.enabled:
                    # a run has more tokens than are used here, but of fewer than columns, as experts have,
                    # H would say that all can be made up for; a tied head's damping counts as embedding
                    few = len(seen.inputs) if seen.tokens < len(seen.inputs) else 0
                    D = uncompensated(seen.inputs, damping_for(settings.damping, few, seen.tokens))
                else:
                    D = seen.inputs.diagonal()
            inputs = seen.inputs
            gradients = seen.gradients if seen.gradients.dim() > 1 else seen.gradients[:, None]
            if seen.rows is not None and key == "embedding":
                gradients = gradients * _left(source, tokens, settings)[seen.rows, None]
            for kind in of_key[key]:
                if kind in TYPES:
                    form = GridFormat.of(TYPES[kind])
                else:
                    form = GridFormat(int(kind), settings.symmetric, settings.group_size)
                of_key[key][kind] += predicted(seen.weight, gradients, D, form, ROWS)
        after()
    return losses


def _left(source: StreamedModel, tokens: Tensor, settings: QuantizationSettings) -> Tensor:
    """Return the share of each embedding's loss ``[vocabulary]`` that the first block's correction leaves."""
    weight = source.model.get_input_embeddings().weight.detach()
    damping = damping_for(settings.damping, weight.shape[1], tokens.numel())
    counts = torch.bincount(tokens.flatten(), minlength=len(weight)).to(weight.device)
    return uncorrected(weight, counts, damping, settings.input_correction or 0.0)
