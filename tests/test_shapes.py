"""The tests refuse a wrong shape each time, though they look at right ones once."""

from collections.abc import Callable

import pytest
import torch
from beartype import beartype
from jaxtyping import Float, TypeCheckError
from torch import Tensor

from tests import shapes


def product(x: Float[Tensor, "a b"], y: Float[Tensor, "b c"]) -> Float[Tensor, "a c"]:
    return x @ y if len(x) < 5 else x


@pytest.mark.parametrize(
    ("x", "y"), [((2, 3), (4, 3)), ((2,), (2, 3)), ((5, 4), (4, 3))], ids=["b", "x", "result"]
)
def test_wrong_shapes_are_refused_before_and_after_right_ones(x: tuple[int, ...], y: tuple[int, ...]) -> None:
    function = shapes.checked(product, typechecker=beartype)
    for _ in range(2):
        with pytest.raises(TypeCheckError):
            function(torch.zeros(x), torch.zeros(y))
        function(torch.zeros(2, 4), torch.zeros(4, 3))


def test_right_shapes_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Callable[..., object]] = []

    def looking(function: Callable[..., object]) -> Callable[..., object]:
        looks.append(function)
        return function

    monkeypatch.setattr(shapes, "RIGHT", set())
    function = shapes.checked(product, typechecker=looking)
    for rows in (2, 2, 3, 3):
        function(torch.zeros(rows, 4), torch.zeros(4, 3))
    assert len(looks) == 2  # arguments, and arguments with the result
