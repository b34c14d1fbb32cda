"""Move batches between where they wait and the device that works on them, while it works on others."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from aespa_pl.storage.batches import Batches


def in_turn(batches: Batches, device: torch.device) -> Iterator[Tensor]:
    """Yield the batches on a device; an accelerator is sent the next one while it works on this one.

    A batch that was yielded may be replaced in ``batches``; the one after it was read already.
    """
    if _are_there(batches, device):
        yield from (batches[i].to(device) for i in range(len(batches)))
        return
    streams = torch.get_device_module(device)
    side = streams.Stream(device)

    def send(index: int) -> tuple[Tensor, Any]:
        batch = batches[index]
        pinned = batch if batch.is_pinned() else batch.pin_memory()  # or the copy would block
        with streams.stream(side):
            return pinned.to(device, non_blocking=True), side.record_event()

    sent = map(send, range(len(batches)))
    ahead = next(sent, None)
    while ahead is not None:
        (batch, arrived), ahead = ahead, next(sent, None)
        current = streams.current_stream(device)
        current.wait_event(arrived)
        batch.record_stream(current)  # whose work must end before side may have the memory
        yield batch


@contextmanager
def sending_back(batches: Batches, device: torch.device) -> Iterator[Callable[[int, Tensor], None]]:
    """Open a context for replacing batches by results; an accelerator works on while they are copied.

    All results are in ``batches`` when the context ends. In it a result may be late by one, and no more:
    the host waits for the one before, so the device's memory never holds more than two.
    """
    if _are_there(batches, device):
        yield batches.__setitem__
        return
    streams = torch.get_device_module(device)
    side = streams.Stream(device)
    waiting: deque[tuple[int, Tensor, Any]] = deque()

    def store() -> None:
        index, copied, done = waiting.popleft()
        done.synchronize()
        batches[index] = copied

    def send(index: int, result: Tensor) -> None:
        side.wait_stream(streams.current_stream(device))
        with streams.stream(side):  # torch takes pinned memory for a copy that does not block
            copied = result.to("cpu", non_blocking=True)
        result.record_stream(side)
        waiting.append((index, copied, side.record_event()))
        if len(waiting) > 1:
            store()

    yield send
    while waiting:
        store()


def _are_there(batches: Batches, device: torch.device) -> bool:
    """Return whether nothing is copied: on a CPU, and where hidden states stay on the device."""
    in_lists = isinstance(batches, list) and len(batches) > 0
    return device.type == "cpu" or (in_lists and batches[0].device == device)
