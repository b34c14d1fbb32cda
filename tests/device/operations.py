"""An operation's name and schema tell what it makes, reads, writes and waits for."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

COPIES = {"_to_copy", "copy_"}
FREE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "_unsafe_view",
}  # fmt: skip
"""Make memory at most, and run nothing."""
OVERWRITING = {"copy_", "zero_", "fill_", "normal_", "uniform_"}
"""Write their first argument without reading it."""
WAITING = {
    "_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "linalg_cholesky", "linalg_inv",
}  # fmt: skip
"""Operations whose result, or its shape, the host needs."""
GATHERING = {"gather", "index", "index_select", "embedding"}
"""Read as many elements as they return."""
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


def tree_leaves(given: Any) -> list[Any]:
    """Return what lists, tuples and dicts hold; torch's own function is ten times as slow."""
    if isinstance(given, dict):
        given = given.values()
    elif not isinstance(given, (list, tuple)):
        return [given]
    return [leaf for inner in given for leaf in tree_leaves(inner)]


def tree_map(change: Callable[[Any], Any], given: Any) -> Any:
    """Return the same lists, tuples and dicts with each leaf changed."""
    if isinstance(given, dict):
        return {name: tree_map(change, inner) for name, inner in given.items()}
    if isinstance(given, (list, tuple)):
        return type(given)(tree_map(change, inner) for inner in given)
    return change(given)


@cache
def aliases(func: Any) -> bool:
    return any(returned.alias_info for returned in func._schema.returns)


@cache
def made_of_others(func: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def run_on_host(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name in ("mm", "bmm") and func._overloadname.startswith("dtype"):
        # bfloat16 operands and a float32 sum, which only accelerators have
        assert args[0].dtype == args[1].dtype == torch.bfloat16, "matrix units want equal types"
        product = args[0].float() @ args[1].float()
        return kwargs["out"].copy_(product) if "out" in kwargs else product
    if name == "_fused_sdp_choice":
        return 0
    return func(*args, **kwargs)


def indexes_with_flags(args: Any) -> bool:
    return any(isinstance(x, Tensor) and x.dtype == torch.bool for x in tree_leaves(args[1]))
