"""A device for tests: tensors in host memory that behave as those of an accelerator do, and are counted.

An operation on tensors of two devices is refused. Copies that don't block arrive late, and a copy that is
used too early is refused. Each operation on the device counts as one kernel (libraries' factorizations
are several in truth), with the bytes that it reads and writes, and so does a function that is compiled
(tests/algorithm/test_fusion.py shows that a compiler makes one kernel of it). Whatever makes the host
wait for the device counts as a synchronization.

Numbers are those of the CPU: this shows what a program asks of an accelerator, not how long it takes.
"""

import copy
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

from aespa_pl.algorithm import fusion

NAME = "simulated"
DEVICE_MEMORY = 80 * 10**9
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


@dataclass
class Tally:
    """What the device was asked for."""

    kernels: Counter[str] = field(default_factory=Counter)
    """By name of the operation."""
    moved: Counter[str] = field(default_factory=Counter)
    """Bytes that they read and wrote, by the same names."""
    waits: Counter[str] = field(default_factory=Counter)
    """What the host waited for."""

    @property
    def count(self) -> int:
        """Number of all kernels."""
        return self.kernels.total()

    @property
    def bytes(self) -> int:
        """Bytes that all kernels read and wrote."""
        return self.moved.total()

    def add(self, name: str, moved: int) -> None:
        """Count a kernel."""
        self.kernels[name] += 1
        self.moved[name] += moved


@dataclass
class Stream:
    """A queue of copies; the current stream of a program computes at once."""

    device: Any = None
    seen: float = 0
    """How much of what the current stream has been given this one waits for."""
    pending: list[Callable[[], None]] = field(default_factory=list)
    stream_id: int = 1

    def wait_stream(self, _other: "Stream") -> None:
        """Wait for all that the current stream has been given."""
        self.seen = math.inf if self is CURRENT else CLOCK[0]

    def record_event(self) -> "Event":
        """Return what happens when all so far is done."""
        return Event(self, CLOCK[0])

    def wait_event(self, event: "Event") -> None:
        """Wait for what another stream was given before the event."""
        if event.stream is not self:
            event.synchronize_quietly()
            self.seen = event.time

    def synchronize(self) -> None:
        """Have the host wait."""
        tally("stream.synchronize")
        self.finish()

    def finish(self) -> None:
        """Do what is pending."""
        pending, self.pending = self.pending, []
        for copying in pending:
            copying()


@dataclass
class Event:
    """A place in a stream."""

    stream: Stream
    time: float

    def synchronize(self) -> None:
        """Have the host wait for the stream up to here; only copies, not computation, end here."""
        self.synchronize_quietly()

    def synchronize_quietly(self) -> None:
        """Finish what the stream was given."""
        self.stream.finish()


CURRENT = Stream(seen=math.inf, stream_id=0)
CLOCK = [0]
"""Operations that the current stream was given."""
active: list[Stream] = []
AnyStream = Stream
"""Its name outside of ``Module``, which has it as an attribute."""
tallies: list[Tally] = []
kernels_open: list["OneKernel"] = []
pinned: set[int] = set()
"""Addresses of pinned host memory."""


class Module:
    """What ``torch.get_device_module`` returns for the device: the part of torch.cuda that is needed."""

    Stream = Stream

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_stream(self, _device: Any = None) -> AnyStream:
        return active[-1] if active else CURRENT

    @contextmanager
    def stream(self, stream: AnyStream) -> Iterator[None]:
        active.append(stream)
        try:
            yield
        finally:
            active.pop()

    def synchronize(self, _device: Any = None) -> None:
        tally("synchronize")

    def mem_get_info(self, _device: Any = None) -> tuple[int, int]:
        return DEVICE_MEMORY, DEVICE_MEMORY

    def max_memory_allocated(self, _device: Any = None) -> int:
        return 0


@cache
def device() -> torch.device:
    """Return the device; torch knows it from then on, in the whole process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, Module())
    return torch.device(f"{NAME}:0")


def tally(wait: str) -> None:
    """Count a synchronization, by its kind and the function of the package that asked for it."""
    if not tallies:
        return
    frame = sys._getframe()
    while frame.f_back and not frame.f_globals.get("__name__", "").startswith("aespa_pl."):
        frame = frame.f_back
    where = f"{wait} in {frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}"
    for one in tallies:
        one.waits[where] += 1


@contextmanager
def counting() -> Iterator[Tally]:
    """Count what happens in this context."""
    tallies.append(found := Tally())
    try:
        yield found
    finally:
        tallies[:] = [one for one in tallies if one is not found]


class OneKernel:
    """A compiled function on its way: one kernel, however many operations it was written with."""

    def __init__(self) -> None:
        self.inside: set[int] = set()
        self.kept: list[Tensor] = []
        self.read: dict[int, int] = {}
        self.written: dict[int, int] = {}

    def see(
        self, reads: Sequence[Tensor], writes: Sequence[Tensor], made: Sequence[Tensor]
    ) -> None:
        """Note what an operation of the function reads, changes and makes."""
        for tensors, where in ((reads, self.read), (writes, self.written)):
            for tensor in tensors:
                if (place := address(tensor)) not in self.inside:
                    where[place] = max(where.get(place, 0), size(tensor))
        self.kept += made  # or an address would be used again
        self.inside |= {address(tensor) for tensor in made}


def compiled(function: Callable[..., Any], **_options: Any) -> Callable[..., Any]:
    """Stand in for ``torch.compile``: run the function, and count it as one kernel."""

    def call(*arguments: Any, **more: Any) -> Any:
        kernels_open.append(one := OneKernel())
        try:
            result = function(*arguments, **more)
        finally:
            kernels_open.pop()
        moved = sum(one.read.values()) + sum(one.written.values())
        moved += sum(size(x) for x in tree_leaves(result) if isinstance(x, SimulatedTensor))
        for found in tallies:
            found.add(function.__name__, moved)
        return result

    return call


class SimulatedTensor(torch.Tensor):
    """A tensor that says that it is on the device."""

    held: Tensor
    arrives: tuple[Stream, Event] | None
    made: int
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
        self.arrives = None
        self.made = CLOCK[0]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SimulatedTensor({self.held})"

    def tolist(self) -> Any:
        tally("tolist")
        return self.held.tolist()

    def record_stream(self, s: Any) -> None:
        """Keep the memory until the stream is done: there is nothing to keep here."""

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


def _mode() -> SimulatedDevice:
    return SimulatedDevice()  # type: ignore[no-untyped-call]


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operation on the host's memory of its tensors."""
    name = func._schema.name.removeprefix("aten::")
    if _made_of_others(func):  # without autograd such an operation comes whole
        with _mode():
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
    _refuse_early(name, here)
    CLOCK[0] += 1
    host = tree_map(_held, (args, kwargs))
    result = _run_on_host(func, name, *host)
    if there:
        result = tree_map(_placed, result)
    if here and _aliases(func):
        result = return_and_correct_aliasing(func, args, kwargs, result)
    if tallies:
        _count(func, name, args, kwargs, result)
    return result


@cache
def _aliases(func: Any) -> bool:
    return any(returned.alias_info for returned in func._schema.returns)


@cache
def _made_of_others(func: Any) -> bool:
    return bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    )


def _run_on_host(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name in ("mm", "bmm") and func._overloadname.startswith("dtype"):
        # bfloat16 operands and a float32 sum, which only accelerators have
        assert args[0].dtype == args[1].dtype == torch.bfloat16, "matrix units want equal types"
        product = args[0].float() @ args[1].float()
        return kwargs["out"].copy_(product) if "out" in kwargs else product
    if name == "_fused_sdp_choice":
        return 0
    return func(*args, **kwargs)


def _copy(func: Any, name: str, args: Any, kwargs: Any, *, to_device: bool) -> Any:
    """Copy within the device, to it or from it; a copy from or to pinned memory need not block."""
    source = args[1] if name == "copy_" else args[0]
    target = args[0] if name == "copy_" else None
    if target is not None:
        to_device = isinstance(target, SimulatedTensor)
    from_device = isinstance(source, SimulatedTensor)
    _refuse_early(name, [x for x in (source,) if from_device])
    host = tree_map(_held, (args, kwargs))
    if from_device and to_device:
        CLOCK[0] += 1
        result = _placed(func(*host[0], **host[1]))
        _count(func, name, args, kwargs, result)
        return target if target is not None else result
    if (
        not from_device and source.dim() == 0 and target is not None
    ):  # a number, sent with the kernel
        func(*host[0], **host[1])
        _count(func, name, args, kwargs, target)
        return target
    on_host = source if not from_device else target
    blocking = not _asks_not_to_block(name, args, kwargs)
    # for a result on the host that need not be there at once, torch takes pinned memory
    free = not blocking and (on_host is None or address(on_host) in pinned)
    if not free:
        tally("copy to the host" if from_device else "copy to the device")
        result = func(*host[0], **host[1])
        return target if target is not None else (_placed(result) if to_device else result)
    return _copy_later(func, host, source, target, to_device=to_device)


def _copy_later(
    func: Any, host: Any, source: Tensor, target: Tensor | None, *, to_device: bool
) -> Any:
    stream = active[-1] if active else CURRENT
    if isinstance(source, SimulatedTensor) and source.made > stream.seen:
        raise RuntimeError("a stream copies what the current stream has not been waited for")
    if target is None:
        held = torch.empty_like(_held(source), dtype=host[1].get("dtype") or source.dtype)
        target = _placed(held) if to_device else held
        pinned.add(address(held))
        KEPT.append(held)
    memory = _held(target)
    kept = _held(source)
    # float("nan") where it has not arrived
    if memory.is_floating_point():
        memory.fill_(math.nan)
    event = Event(stream, 0)

    def arrive() -> None:
        memory.copy_(kept)

    stream.pending.append(arrive)
    if stream is CURRENT:
        stream.finish()
    elif isinstance(target, SimulatedTensor):
        target.arrives = (stream, event)
    return target


def _asks_not_to_block(name: str, args: Any, kwargs: Any) -> bool:
    return bool(kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))


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


def _refuse_early(name: str, here: Sequence["SimulatedTensor"]) -> None:
    for tensor in here:
        if tensor.arrives is not None and tensor.arrives[0].pending:
            raise RuntimeError(f"{name}: a copy is used before it has arrived")


def _count(  # noqa: C901 - one look at each argument of an operation
    func: Any, name: str, args: Any, kwargs: Any, result: Any
) -> None:
    flags = [x for x in tree_leaves(args) if isinstance(x, Tensor) and x.dtype == torch.bool]
    if name in WAITING or (name in INDEXING and flags and _indexes_with(args)):
        tally(name)
    schema = func._schema
    views = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
    if views or name in FREE or name == "_local_scalar_dense":
        return
    reads, writes = [], []
    given = {a.name: v for a, v in zip(schema.arguments, args, strict=False)} | kwargs
    for argument in schema.arguments:
        tensors = [
            x for x in tree_leaves(given.get(argument.name)) if isinstance(x, SimulatedTensor)
        ]
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
    made = [
        x for x in tree_leaves(result) if isinstance(x, SimulatedTensor) and id(x) not in changed
    ]
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


def _indexes_with(args: Any) -> bool:
    return any(isinstance(x, Tensor) and x.dtype == torch.bool for x in tree_leaves(args[1]))


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


def _pin(tensor: Tensor, *_: Any) -> Tensor:
    found = tensor.clone()
    pinned.add(address(found))
    KEPT.append(found)
    return found


KEPT: list[Tensor] = []
"""Pinned memory of a test: an address is not used again."""


@contextmanager
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Have the device for the time of a test."""
    where = device()
    monkeypatch.setattr(torch, "compile", compiled)
    fusion.compiled.cache_clear()
    monkeypatch.setattr(torch.Tensor, "pin_memory", _pin)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda t, *_: address(t) in pinned)
    only = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        # other tests may have used autograd before it knew of the device: it has no thread for it
        with torch.autograd.set_multithreading_enabled(mode=False), _mode():
            yield where
    finally:
        fusion.compiled.cache_clear()
        torch._C._set_only_lift_cpu_tensors(only)
        KEPT.clear()
        pinned.clear()


class SimulatedAccelerator(Accelerator):
    """The device as Lightning wants to know it."""

    def setup_device(self, device: torch.device) -> None:
        pass

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: Any) -> int:
        return int(devices)

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        return [device()] * devices

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return NAME


def strategy() -> SingleDeviceStrategy:
    """Return what a Trainer needs as ``strategy`` to work on the device."""
    return SingleDeviceStrategy(device(), accelerator=SimulatedAccelerator())
