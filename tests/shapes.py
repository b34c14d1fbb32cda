"""Check the shapes in the algorithm's signatures once for each combination that a function is called with.

A walk calls the algorithm some thousand times, and nearly all calls repeat the shapes of an earlier one.
To check every call takes several times as long as the rest of a walk. pytest's options in pyproject.toml
let jaxtyping decorate the algorithm; its decorator is replaced here, before the algorithm is imported.
"""

import functools
import inspect
from collections.abc import Callable, Hashable
from dataclasses import is_dataclass
from typing import Any

import jaxtyping
from torch import Tensor

RIGHT = set[Hashable]()
"""Names of functions, with what they were called with, that were right."""
EVERY_CALL = jaxtyping.jaxtyped


def checked(function: Any = None, *, typechecker: Any) -> Any:
    """Return a function that checks its calls, each combination of shapes, types and whole numbers once.

    An inner function is made again with each call of the outer one, and is known by its name.
    """
    if function is None:
        return functools.partial(checked, typechecker=typechecker)
    if inspect.isclass(function):
        if is_dataclass(function):
            plain = vars(function)["__init__"]
            setattr(function, "__init__", checked(plain, typechecker=typechecker))  # noqa: B010 - for mypy
        return function
    check: Callable[[], Any] = functools.cache(lambda: EVERY_CALL(function, typechecker=typechecker))
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


jaxtyping.jaxtyped = checked  # type: ignore[assignment]


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
