"""A device for tests: tensors in host memory that behave as those of an accelerator do, and are counted.

An operation on tensors of two devices is refused. Each operation on the device counts as one kernel
(libraries' factorizations are several in truth), with the bytes that it reads and writes, and so does a
function that is compiled (tests/algorithm/test_fusion.py shows that a compiler makes one kernel of it).
Whatever makes the host wait for the device counts as a synchronization.

Numbers are those of the CPU: this shows what a program asks of an accelerator, not how long it takes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy

from aespa_pl.algorithm import workspace
from tests.device.module import NAME, device
from tests.device.operations import tree_leaves
from tests.device.tally import tallies
from tests.device.tensors import OneKernel, SimulatedTensor, kernels_open, mode, size


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


@contextmanager
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Have the device for the time of a test."""
    where = device()
    monkeypatch.setattr(torch, "compile", compiled)
    workspace.compiled.cache_clear()
    only = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        # other tests may have used autograd before it knew of the device: it has no thread for it
        with torch.autograd.set_multithreading_enabled(mode=False), mode():
            yield where
    finally:
        workspace.compiled.cache_clear()
        torch._C._set_only_lift_cpu_tensors(only)


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
