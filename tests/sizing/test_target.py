"""A target is read, and what it leaves to the matrices is counted."""

import pytest

from aespa_pl.errors import UserError
from aespa_pl.models import family_of
from aespa_pl.planning.shape import Shape
from aespa_pl.settings import QuantizationSettings
from aespa_pl.sizing.choose import Choices, Target, limit_of
from aespa_pl.sizing.matrices import SizedMatrix, fitting_types, uniform_matrices
from tests.models.examples import EXAMPLES


@pytest.mark.parametrize(
    ("given", "size", "bits"),
    [
        ("3.5 GB", 3.5e9, None), ("300MB", 3e8, None), ("2 GiB", 2.0**31, None), (" 40 kB ", 4e4, None),
        ("2.75", None, 2.75), (2.75, None, 2.75), (3, None, 3.0),
    ],
)  # fmt: skip
def test_sizes_and_bits_are_read(given: float | str, size: float | None, bits: float | None) -> None:
    assert Target.of(given) == Target(size, bits)


@pytest.mark.parametrize(
    "given", ["big", "3 apples", "-3 GB", "GB", "", "3.5.1 GB", "0", 0, -1, "nan", "inf"]
)
def test_other_texts_are_refused(given: float | str) -> None:
    with pytest.raises(UserError, match=r"expected a size such as 3\.5 GB or 300 MB"):
        Target.of(given)


def choices() -> Choices:
    matrices = [
        SizedMatrix(("0.a", "0.b"), 80, {"2": 20, "4": 40}),
        SizedMatrix(("1.a",), 40, {"2": 10, "4": 20, "8": 40}),
    ]
    return Choices.of(matrices, [{"2": 4.0, "4": 1.0}, {"2": 3.0, "4": 0.5, "8": 0.1}])


def test_projections_of_one_matrix_get_the_same_and_losses_add_up() -> None:
    found = choices()
    chosen = found.best(45)
    assert chosen == {"0.a": "2", "0.b": "2", "1.a": "4"}
    assert (found.bytes(chosen), found.loss(chosen)) == (40, 4.5)
    assert found.best(1000) == {"0.a": "4", "0.b": "4", "1.a": "8"}
    curve = found.curve(7)
    assert curve[0] == (37, 7.0)
    assert curve[-1][0] == 87
    assert curve[-1][1] == pytest.approx(1.1)


def test_limits_are_named_with_what_else_the_file_holds() -> None:
    found = choices()
    assert limit_of(Target(None, 4.0), 4.0, found.matrices, 0) == 60
    assert limit_of(Target(100.0, None), "100 B", found.matrices, 40) == 60
    with pytest.raises(UserError, match=r"target is 1.9, and this model can have 2.00 to 5.33 bits"):
        limit_of(Target(None, 1.9), 1.9, found.matrices, 0)
    with pytest.raises(UserError, match=r"can have 2.001 to 2.000 MB"):
        limit_of(Target(1e3, None), "1 kB", found.matrices, 2_000_000)


def test_all_experts_of_a_block_get_the_same_bits() -> None:
    config = EXAMPLES["mixtral"]()
    family = family_of(config)
    shape, layouts = Shape.of(config, family.layouts(config)), family.layouts(config)
    found = uniform_matrices(layouts, shape, QuantizationSettings(), {})
    experts = int(config.num_local_experts)
    assert sorted(len(m.keys) for m in found) == sorted(3 * ([1] * 4 + [experts] * 3))
    every = [matrix for of_block in shape.of_blocks for matrix in of_block.values()]
    assert sum(m.weights for m in found) == sum(matrix.rows * matrix.columns for matrix in every)
    # 2 bits a weight; a scale of 16 bits and a zero point of 2 for each row
    least = sum(matrix.rows * (2 * matrix.columns + 18) for matrix in every) / 8
    assert sum(m.costs["2"] for m in found) == pytest.approx(least, abs=len(found))


def test_rows_of_whole_large_blocks_have_types_of_llama_cpp_with_sub_scales() -> None:
    assert fitting_types(512) == ("Q2_K", "Q3_K", "IQ4_XS", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
    assert fitting_types(192) == ("Q2_0", "IQ4_NL", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
    assert "Q2_0" not in fitting_types(96)
    assert fitting_types(40) == ()


def test_bits_of_some_experts_alone_are_refused() -> None:
    config = EXAMPLES["mixtral"]()
    layouts = family_of(config).layouts(config)
    names = [p.name for p in layouts[0].projections if p.expert is not None and "up" in p.name]
    shape = Shape.of(config, layouts)
    with pytest.raises(UserError, match=rf"has 0\.{names[1]}: 8, but quantization.target chooses for 0\."):
        uniform_matrices(layouts, shape, QuantizationSettings(), {f"0.{names[1]}": "8"})
    found = uniform_matrices(layouts, shape, QuantizationSettings(), {f"0.{name}": "8" for name in names})
    assert sum(list(m.costs) == ["8"] for m in found) == 1
