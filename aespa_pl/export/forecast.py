"""Say before a run what its integers will become in the files that engines load."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from transformers import PreTrainedConfig

from aespa_pl.export.format import joins_experts, kept_in_part
from aespa_pl.export.gguf_bytes import BlockType, smallest_type, zero_points
from aespa_pl.models import family_of
from aespa_pl.models.family import BlockLayout
from aespa_pl.models.kept import layouts_of
from aespa_pl.models.llama_cpp import OTHER_ORDER, crosses_heads, other_heads
from aespa_pl.models.llama_cpp_limits import unsupported_part
from aespa_pl.planning.shape import Shape
from aespa_pl.settings import QuantizationSettings

MIXTURE = {2: "Q2_K", 3: "Q3_K_M", 4: "Q4_K_M", 5: "Q5_K_M"}
"""llama.cpp's usual mixture, by its bits."""
FOLDER_SCALE_BITS = 32
"""Bits of a scale in compressed-tensors."""
EXPERT = re.compile(r"expert_\d+_")
CONTAINER = 4
"""Bits of the integers that vLLM has kernels for."""


def forecast(
    settings: QuantizationSettings, shape: Shape, config: PreTrainedConfig, lacking: str | None = None
) -> str:
    """Return a sentence: bits a weight in each file, and a grid that takes fewer of them.

    ``lacking`` is the part of the model's tokenizer that llama.cpp does not have.
    """
    kind = "symmetric" if settings.symmetric else "asymmetric"
    groups = f"groups of {settings.group_size}" if settings.group_size else "per channel"
    layouts = layouts_of(family_of(config), config, settings)
    lacking = unsupported_part(config) or lacking
    if lacking is None and crosses_heads(config, settings):
        lacking = OTHER_ORDER
    elif lacking is None and _divides_experts(layouts):
        lacking = "some experts keep their weights, and llama.cpp has all of them in one tensor"
    mixture = None if other_heads(config) else MIXTURE.get(settings.bits)
    in_gguf = _in_gguf(settings, shape, mixture) if lacking is None else f"no GGUF file, because {lacking}"
    files = f"{in_gguf}; {_in_folders(settings, shape, config, layouts)}"
    all_bits = {bits for bits, *_ in _matrices(settings, shape)}
    least, most = min(all_bits), max(all_bits)
    return f"{least if least == most else f'{least} to {most}'} bits, {kind}, {groups}: {files}"


def _in_gguf(settings: QuantizationSettings, shape: Shape, mixture: str | None) -> str:
    size = 64 if settings.bits == 2 else 32  # columns of the blocks of Q2_0 and of Q4_0
    symmetric = replace(settings, symmetric=True)
    grids = (settings, symmetric, replace(symmetric, group_size=size))
    types, same, other = (_types(grid, shape) for grid in grids)
    advice = f" (symmetric groups of {size} would be {_words(other)})" if _mean(other) < _mean(types) else ""
    # most searched grids have no other zero points
    if types and settings.bits == 2 and _mean(same) < _mean(types):
        advice = f" (down to {_words(same)}, where the zero points of a matrix are 1 and 2)"
    if not types:
        return f"no GGUF file, because no type of llama.cpp holds this grid{advice}"
    told = f", or llama.cpp's own types by --quantization.format {mixture}" if mixture else ""
    return f"{_words(types)} bits a weight in GGUF{advice}{told}"


def _divides_experts(layouts: Sequence[BlockLayout]) -> bool:
    """Return whether some experts of a block keep weights that others don't."""
    kept = {
        (block, EXPERT.sub("experts_", p.name), p.kept)
        for block, layout in enumerate(layouts)
        for group in layout.groups
        for p in group.projections
    }
    return len(kept) > len({key[:2] for key in kept})


def _in_folders(
    settings: QuantizationSettings, shape: Shape, config: PreTrainedConfig, layouts: Sequence[BlockLayout]
) -> str:
    family = family_of(config)
    experts = [
        f"{family.block_prefix(0)}{p.module}.weight" for p in shape.layout.projections if p.expert is not None
    ]
    if joins_experts(family, experts):
        return "no compressed-tensors, which has no name for experts in one tensor"
    groups = (group for layout in layouts for group in layout.groups)
    if any(p.kept and p.expert is not None for group in groups for p in group.projections):
        return "no compressed-tensors, which has experts either all as integers or none"
    if shape.layout.mixture is not None and not settings.symmetric:
        return "no compressed-tensors, which has no zero points of experts: set quantization.symmetric true"
    matrices = list(_matrices(settings, shape))
    numbers, more = {bits for bits, *_ in matrices}, ""
    if len(numbers) > 1:  # they are all stored with as many
        least = CONTAINER if max(numbers) <= CONTAINER else 2 * CONTAINER
        matrices, more = [(least, c, n) for _, c, n in matrices], f" with --container_bits {least}"
    elif settings.bits < CONTAINER:
        more = f", {CONTAINER} and more in vLLM's containers"
    if words := kept_in_part(layouts):
        more += f", but not for vLLM, because {words}"
    zero = 0 if settings.symmetric else 1
    total = sum(
        size * (bits + (FOLDER_SCALE_BITS + zero * bits) / (settings.group_size or columns))
        for bits, columns, size in matrices
    )
    mean = total / sum(size for *_, size in matrices)
    return f"{mean:.2f} in compressed-tensors{more}"


def _matrices(settings: QuantizationSettings, shape: Shape) -> Iterator[tuple[int, int, int]]:
    """Yield bits, columns and number of weights of each matrix of the model."""
    for block, matrices in enumerate(shape.of_blocks):
        for name, matrix in matrices.items():
            yield settings.bits_for(block, name), matrix.columns, matrix.size


def _types(settings: QuantizationSettings, shape: Shape) -> Mapping[BlockType, int]:
    """Return how many weights have each type, of none if a matrix has none. All experts are one tensor."""
    tensors = defaultdict[tuple[int, str], list[tuple[int, int, int]]](list)
    for block, matrices in enumerate(shape.of_blocks):
        for name, matrix in matrices.items():
            numbers = settings.bits_for(block, name), matrix.columns, matrix.size
            tensors[block, EXPERT.sub("experts_", name)].append(numbers)
    weights = Counter[BlockType]()
    for tensor in tensors.values():
        zeros = {zero for bits, *_ in tensor for zero in zero_points(bits, symmetric=settings.symmetric)}
        kind = smallest_type(max(bits for bits, *_ in tensor), tensor[0][1], settings.group_size, zeros)
        if kind is None:
            return {}
        weights[kind] += sum(size for *_, size in tensor)
    return weights


def _mean(types: Mapping[BlockType, int]) -> float:
    total = sum(types.values())
    return sum(kind.bits * size for kind, size in types.items()) / total if total else math.inf


def _words(types: Mapping[BlockType, int]) -> str:
    names = " and ".join(kind.name for kind in sorted(types, key=lambda kind: kind.bits))
    return f"{names}, {_mean(types):.3g}"
