"""Let a device repeat a function of many small kernels with one launch: a CUDA graph.

A kernel of few numbers takes a GPU less time than the host takes to launch it. A graph holds the kernels
of a function with the memory that they read and write, and launches all of them at once.

A graph that does something else than its function would leave wrong integers that look like any others. So
it is used only where it has proven itself: it is captured with the second inputs of their shapes and computes
their results, then the function does, and the two must agree in every bit.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

log = logging.getLogger(__name__)

Tensors = tuple[Tensor, ...]


@runtime_checkable
class Graph(Protocol):
    """Captures what a function launches, and launches it again."""

    def capture(self, function: Callable[[], Tensors]) -> Tensors:
        """Note the kernels of a function; return its results, which hold numbers only after ``replay``."""

    def replay(self) -> None:
        """Launch the kernels again, on the same memory."""


class CudaGraph:
    """Captures what a function launches on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        """Begin with nothing on a device, which need not be the current one."""
        self._device = device
        with torch.cuda.device(device):
            self._graph = torch.cuda.CUDAGraph()

    def capture(self, function: Callable[[], Tensors]) -> Tensors:
        """Note the kernels of a function, in a stream of its own, as CUDA demands."""
        current, apart = torch.cuda.current_stream(self._device), torch.cuda.Stream(self._device)
        apart.wait_stream(current)
        with torch.cuda.stream(apart):
            # torch.cuda.graph() would collect all of Python's garbage first, for each projection.
            # Copies that other threads send meanwhile are none of our business: thread_local.
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                results = function()
            finally:
                self._graph.capture_end()
        current.wait_stream(apart)
        return results

    def replay(self) -> None:
        """Launch the kernels again."""
        with torch.cuda.device(self._device):
            self._graph.replay()


GRAPHS: dict[str, Callable[[torch.device], Graph]] = {"cuda": CudaGraph}
"""What makes a graph, by the type of the device; on other devices functions run as they are."""
_refused = set[tuple[str, str]]()
"""Types of devices, and what graphs failed there for, or computed something else than their function."""


@dataclass
class _Captured:
    """Holds a graph with the memory that it reads and writes."""

    graph: Graph
    inputs: Tensors
    results: Tensors

    def run(self, inputs: Tensors) -> Tensors:
        torch._foreach_copy_(self.inputs, inputs)  # one kernel for all
        self.graph.replay()
        return self.results


class Replayed:
    """Calls a function; from the third time with inputs of the same shapes on, by a graph if there are any.

    It keeps the memory of its graphs as long as it lives.
    """

    def __init__(self, function: Callable[..., Tensors], purpose: str) -> None:
        """Take the function.

        Args:
            function: Function of tensors on one device, which neither reads a number on the host nor changes
                its inputs. Besides, it may read and write memory of its own, the same in all calls; what it
                writes there must be among its results.
            purpose: Purpose of the function, which the warning names if it runs without graphs.
        """
        self.function, self.purpose = function, purpose
        self._seen: dict[tuple[torch.Size, ...], _Captured | None] = {}

    def __call__(self, *inputs: Tensor) -> Tensors:
        """Return the results; their memory may be used again by the next call."""
        device = inputs[0].device
        if device.type not in GRAPHS or (device.type, self.purpose) in _refused:
            return self.function(*inputs)
        shapes = tuple(x.shape for x in inputs)
        captured = self._seen.get(shapes)
        if captured is not None:
            return captured.run(inputs)
        if shapes in self._seen:
            return self._capture(shapes, inputs)
        self._seen[shapes] = None  # libraries prepare themselves, which a graph must not hold
        return self.function(*inputs)

    def _capture(self, shapes: tuple[torch.Size, ...], inputs: Tensors) -> Tensors:
        """Make a graph, try it before the function, and return what the function returns."""
        device = inputs[0].device
        mine = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs)
        try:
            graph = GRAPHS[device.type](device)
            captured = _Captured(graph, mine, graph.capture(lambda: self.function(*mine)))
            # the function may write to the same memory again
            found = tuple(x.clone() for x in captured.run(inputs))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._refuse(device, str(error))
            return self.function(*inputs)
        expected = self.function(*inputs)
        if all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
            self._seen[shapes] = captured
        else:
            self._refuse(device, "its result differs from that of single kernels")
        return expected

    def _refuse(self, device: torch.device, reason: str) -> None:
        _refused.add((device.type, self.purpose))
        log.warning("CUDA graphs can't be used here, so %s is slower: %s", self.purpose, reason)
