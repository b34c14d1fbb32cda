"""Check the shapes in the algorithm's signatures; pytest's options in pyproject.toml name this checker.

A walk calls the algorithm some thousand times, and nearly all calls repeat the shapes of an earlier one.
To check every call takes three times as long as the rest of a walk.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any

from beartype import beartype
from torch import Tensor

RIGHT = set[Hashable]()
"""Names of functions, with what they were called with, that were right."""


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that checks its calls, each combination of shapes, types and whole numbers once.

    An inner function is made again with each call of the outer one, and is known by its name.
    """
    check = functools.cache(lambda: beartype(function))
    name = function.__module__, function.__qualname__, repr(function.__annotations__)

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        key = name, kind(arguments), kind(named)
        if key in RIGHT:
            return function(*arguments, **named)
        result = check()(*arguments, **named)
        RIGHT.add(key)
        return result

    return call


def kind(value: Any) -> Hashable:
    """Return what a check of a value depends on."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape
    cls = type(value)
    if cls in (int, bool, str):  # a shape may be computed from a number
        return cls, value
    if cls in (tuple, list):
        return cls, *map(kind, value)
    if cls is dict:
        return cls, *value, *map(kind, value.values())
    return cls.__name__
