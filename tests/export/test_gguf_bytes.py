"""The bytes of every block type mean the numbers that a matrix stores, to gguf and to llama.cpp itself."""

import ctypes
from collections.abc import Iterable
from importlib import import_module

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from aespa_pl.algorithm.grid_types import TYPES, GridType, TypedWeight
from aespa_pl.algorithm.quantizer import QuantizedWeight
from aespa_pl.export.gguf_bytes import BLOCK_TYPES, Bytes, as_typed, smallest_type, zero_points
from aespa_pl.export.gguf_values import dequantized
from tests.export.gguf_files import llama_cpp
from tests.export.runs import dequantized as uniform

COLUMNS = 512


def random_matrix(kind: GridType) -> TypedWeight:
    """Return integers, factors and minimums over all of their ranges."""
    generator = torch.Generator().manual_seed(0)

    def between(low: int, high: int, columns: int) -> Tensor:
        kind_of_integer = torch.int8 if low < 0 else torch.uint8
        found = torch.randint(low, high + 1, (5, columns), generator=generator)
        return found.to(kind_of_integer)

    def halves() -> Tensor:
        return torch.randn(5, COLUMNS // kind.block, generator=generator).half()

    minimums, groups = kind.zero_point is None, COLUMNS // kind.group
    integers = torch.tensor(kind.levels or range(kind.largest + 1), dtype=torch.uint8)
    return TypedWeight(
        integers[between(0, len(integers) - 1, COLUMNS).int()],
        halves(),
        halves() if minimums else None,
        between(*kind.scales, groups) if kind.groups > 1 else None,
        between(*kind.minimums, groups) if kind.groups > 1 and minimums else None,
        kind=kind,
    )


def by_loops(kind: GridType, matrix: TypedWeight) -> Tensor:
    """Compute each weight by the formula of its type in float64, rounded to float32 once per term."""
    result = torch.empty(matrix.integers.shape)
    for row, values in enumerate(matrix.integers.tolist()):
        for column, q in enumerate(values):
            block, group = column // kind.block, column // kind.group
            a = 1 if matrix.sub_scale is None else int(matrix.sub_scale[row, group])
            scale = float(matrix.d[row, block]) * a
            if matrix.d_min is None:
                result[row, column] = scale * (q - (kind.zero_point or 0))
            else:
                c = 1 if matrix.sub_min is None else int(matrix.sub_min[row, group])
                minimum = float(matrix.d_min[row, block]) * c
                result[row, column] = torch.tensor(scale * q) - torch.tensor(minimum)
    return result


def in_c(name: str, data: Bytes, columns: int) -> Tensor:
    """Return what llama.cpp's own function makes of the bytes."""
    library = ctypes.CDLL(import_module("xllamacpp").xllamacpp.__file__)
    result = np.zeros((len(data), columns), np.float32)
    data = np.ascontiguousarray(data)
    getattr(library, f"dequantize_row_{name.lower() if name[0] == 'I' else name.replace('Q', 'q')}")(
        data.ctypes.data_as(ctypes.c_void_p),
        result.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int64(result.size),
    )
    return torch.from_numpy(result)


@pytest.mark.parametrize("name", TYPES)
def test_gguf_reads_what_was_stored(name: str) -> None:
    matrix = random_matrix(TYPES[name])
    data = BLOCK_TYPES[name].encode(matrix)
    found = dequantized(data, GGMLQuantizationType(BLOCK_TYPES[name].number))
    assert torch.equal(torch.from_numpy(found), by_loops(TYPES[name], matrix))


@llama_cpp
@pytest.mark.parametrize("name", TYPES)
def test_llama_cpps_own_dequantizer_reads_what_was_stored(name: str) -> None:
    matrix = random_matrix(TYPES[name])
    found = in_c(name, BLOCK_TYPES[name].encode(matrix), COLUMNS)
    assert torch.equal(found, by_loops(TYPES[name], matrix))


UNIFORM = [
    ("Q2_0", 2, [1, 2]),
    ("Q2_K", 2, range(4)),
    ("Q3_K", 3, [3, 4]),
    ("Q4_K", 4, range(16)),
    ("Q4_0", 3, range(8)),
    ("Q4_0", 4, [7, 8]),
    ("Q5_K", 5, range(32)),
    ("Q5_0", 4, range(16)),
    ("Q6_K", 5, range(32)),
    ("Q6_K", 6, [31, 32]),
    ("Q8_0", 7, range(128)),
]


@pytest.mark.parametrize(("name", "bits", "zeros"), UNIFORM)
def test_uniform_grids_are_exact(name: str, bits: int, zeros: list[int]) -> None:
    """Every q with every z, at scales with all eleven bits."""
    levels = 2**bits
    q = torch.arange(256).repeat(len(zeros), 1).remainder(levels).to(torch.uint8)
    zero = torch.tensor(list(zeros), dtype=torch.uint8)[:, None]
    scale = (torch.rand(len(zeros), 1) + 0.01).half()
    matrix = as_typed(TYPES[name], QuantizedWeight(q, scale, zero, bits))
    data = BLOCK_TYPES[name].encode(matrix)
    found = dequantized(data, GGMLQuantizationType(BLOCK_TYPES[name].number))
    assert torch.equal(torch.from_numpy(found), uniform(q, scale, zero))


def both(limits: tuple[int, int], top: int, zeros: Iterable[int]) -> bool:
    """Return whether the numbers of each zero point fit, with the scale or with the negative scale."""
    low, high = limits
    return all(
        any(all(low <= sign * (q - zero) <= high for q in (0, top)) for sign in (1, -1)) for zero in zeros
    )


@pytest.mark.parametrize("columns", [32, 64, 256, 512, 96, 40])
@pytest.mark.parametrize("group_size", [None, 32, 64, 256])
def test_smallest_type_is_the_smallest_that_holds_the_range(columns: int, group_size: int | None) -> None:
    ranges = {"Q2_0": (-1, 2), "Q3_K": (-4, 3), "Q4_0": (-8, 7), "Q5_0": (-16, 15)}
    ranges |= {"Q6_K": (-32, 31), "Q8_0": (-128, 127)}
    minimums = {"Q2_K": 3, "Q4_K": 15, "Q5_K": 31}
    bits_a_weight = {
        "Q2_0": 2.25, "Q2_K": 2.625, "Q3_K": 3.4375, "Q4_K": 4.5, "Q4_0": 4.5, "Q5_K": 5.5,
        "Q5_0": 5.5, "Q6_K": 6.5625, "Q8_0": 8.5,
    }  # fmt: skip
    blocks = dict.fromkeys(bits_a_weight, 256) | dict.fromkeys(("Q4_0", "Q5_0", "Q8_0"), 32)
    blocks["Q2_0"] = 64
    for bits in range(2, 9):
        top = 2**bits - 1
        for zeros in (range(2**bits), [2 ** (bits - 1)], [2 ** (bits - 1) - 1, 2 ** (bits - 1)]):
            possible = [
                name
                for name, block in blocks.items()
                if columns % block == 0 and (group_size or columns) % block == 0
                if (top <= minimums[name] if name in minimums else both(ranges[name], top, zeros))
            ]
            found = smallest_type(bits, columns, group_size, zeros)
            best = min((bits_a_weight[name] for name in possible), default=None)
            assert (found and found.bits) == best
            assert found is None or found.name in possible


def test_a_grid_has_the_zero_points_that_its_bits_allow() -> None:
    assert set(zero_points(2, symmetric=False)) == {0, 1, 2, 3}
    assert set(zero_points(4, symmetric=True)) == {8}
