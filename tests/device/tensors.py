"""A simulated tensor refuses what a device refuses, and counts each operation as one kernel."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

from tests.device.module import NAME, device
from tests.device.operations import (
    COPIES,
    FREE,
    GATHERING,
    INDEXING,
    OVERWRITING,
    WAITING,
    aliases,
    indexes_with_flags,
    made_of_others,
    run_on_host,
    tree_leaves,
    tree_map,
)
from tests.device.tally import tallies, tally

kernels_open: list["OneKernel"] = []


class OneKernel:
    """A compiled function on its way: one kernel, however many operations it was written with."""

    def __init__(self) -> None:
        self.inside: set[int] = set()
        self.kept: list[Tensor] = []
        self.read: dict[int, int] = {}
        self.written: dict[int, int] = {}

    def see(self, reads: Sequence[Tensor], writes: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """Note what an operation of the function reads, changes and makes."""
        for tensors, where in ((reads, self.read), (writes, self.written)):
            for tensor in tensors:
                if (place := address(tensor)) not in self.inside:
                    where[place] = max(where.get(place, 0), size(tensor))
        self.kept += made  # or an address would be used again
        self.inside |= {address(tensor) for tensor in made}


class SimulatedTensor(torch.Tensor):
    """A tensor that says that it is on the device."""

    held: Tensor
    is_cuda = True

    @staticmethod
    def __new__(cls, held: Tensor) -> "SimulatedTensor":
        made: SimulatedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=device(),
        )
        return made

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SimulatedTensor({self.held})"

    def tolist(self) -> Any:
        tally("tolist")
        return self.held.tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> "SimulatedTensor":
        return SimulatedTensor(copy.deepcopy(self.held, memo))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return run(func, args, kwargs or {})


class SimulatedDevice(TorchDispatchMode):
    """Runs a program that asks for the device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return run(func, args, kwargs or {})


def mode() -> SimulatedDevice:
    return SimulatedDevice()  # type: ignore[no-untyped-call]


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operation on the host's memory of its tensors."""
    name = func._schema.name.removeprefix("aten::")
    if made_of_others(func):  # without autograd such an operation comes whole
        with mode():
            return func.decompose(*args, **kwargs)
    leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    here = [x for x in leaves if isinstance(x, SimulatedTensor)]
    wanted = next((x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.device)), None)
    there = bool(here) if wanted is None else wanted.type == NAME
    if not here and not there:
        return func(*args, **kwargs)
    if name in COPIES:
        return _copy(func, name, args, kwargs, to_device=there)
    _refuse_mixed(name, leaves, args)
    host = tree_map(_held, (args, kwargs))
    result = run_on_host(func, name, *host)
    if there:
        result = tree_map(_placed, result)
    if here and aliases(func):
        result = return_and_correct_aliasing(func, args, kwargs, result)
    if tallies:
        _count(func, name, args, kwargs, result)
    return result


def _copy(func: Any, name: str, args: Any, kwargs: Any, *, to_device: bool) -> Any:
    """Copy within the device, or to it or from it, which the host waits for."""
    source = args[1] if name == "copy_" else args[0]
    target = args[0] if name == "copy_" else None
    if target is not None:
        to_device = isinstance(target, SimulatedTensor)
    from_device = isinstance(source, SimulatedTensor)
    host = tree_map(_held, (args, kwargs))
    if from_device and to_device:
        result = _placed(func(*host[0], **host[1]))
        _count(func, name, args, kwargs, result)
        return target if target is not None else result
    if not from_device and source.dim() == 0 and target is not None:  # a number, sent with the kernel
        func(*host[0], **host[1])
        _count(func, name, args, kwargs, target)
        return target
    tally("copy to the host" if from_device else "copy to the device")
    result = func(*host[0], **host[1])
    return target if target is not None else (_placed(result) if to_device else result)


def _refuse_mixed(name: str, leaves: Sequence[Tensor], args: Any) -> None:
    here = [x for x in leaves if isinstance(x, SimulatedTensor)]
    others = [x for x in leaves if not isinstance(x, SimulatedTensor) and x.device.type != "meta"]
    if not here or not others:
        return
    if name in INDEXING and isinstance(args[0], SimulatedTensor):
        tally("copy of an index to the device")
        return
    large = [x for x in others if x.dim() > 0]
    if large:
        shapes = [(tuple(x.shape), isinstance(x, SimulatedTensor)) for x in leaves]
        raise RuntimeError(f"{name}: tensors of two devices: {shapes}")


def _count(  # noqa: C901 - one look at each argument of an operation
    func: Any, name: str, args: Any, kwargs: Any, result: Any
) -> None:
    flags = [x for x in tree_leaves(args) if isinstance(x, Tensor) and x.dtype == torch.bool]
    if name in WAITING or (name in INDEXING and flags and indexes_with_flags(args)):
        tally(name)
    schema = func._schema
    views = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
    if views or name in FREE or name == "_local_scalar_dense":
        return
    reads, writes = [], []
    given = {a.name: v for a, v in zip(schema.arguments, args, strict=False)} | kwargs
    for argument in schema.arguments:
        tensors = [x for x in tree_leaves(given.get(argument.name)) if isinstance(x, SimulatedTensor)]
        written = bool(argument.alias_info and argument.alias_info.is_write)
        if name == "_fused_adam_" and argument.name == "grads":
            written = False  # only a gradient scaler changes them
        if written:
            writes += tensors
        if name.startswith("new_") or name.endswith("_like"):
            continue  # told a shape, not read
        if not written or not (argument.is_out or name in OVERWRITING):
            reads += tensors
    changed = {id(x) for x in writes}
    made = [x for x in tree_leaves(result) if isinstance(x, SimulatedTensor) and id(x) not in changed]
    if kernels_open:
        kernels_open[-1].see(reads, writes, made)
        return
    moved = sum(size(x) for x in made) + sum(size(x) for x in writes)
    if name in GATHERING:
        moved *= 2
    else:
        moved += sum(size(x) for x in reads)
    for one in tallies:
        one.add(name, moved)


def address(tensor: Tensor) -> int:
    """Return what tells the memory of a tensor from any other."""
    return int(_held(tensor).untyped_storage().data_ptr())


def size(tensor: Tensor) -> int:
    """Return the bytes of a tensor's memory, once for what is expanded."""
    shape = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * math.prod(n for n, stride in shape if stride)


def _held(value: Any) -> Any:
    if isinstance(value, SimulatedTensor):
        return value.held
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _placed(value: Any) -> Any:
    if isinstance(value, Tensor) and not isinstance(value, SimulatedTensor):
        return SimulatedTensor(value)
    return value
