"""A simulated CUDA graph: it repeats operations on the memory that they had when they were captured."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from aespa_pl.algorithm import replay
from tests.device.operations import aliases, run_on_host, tree_leaves
from tests.device.streams import NAME
from tests.device.tally import capturing, tallies


class RecordedGraph:
    """Holds operations; what the host computed for them while they were captured is not computed again."""

    def __init__(self, device: torch.device) -> None:
        self.work: list[tuple[Any, str, Any, Any]] = []

    def capture(self, function: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        capturing.append(self)
        try:
            results = function()
        finally:
            capturing.pop()
        for func, _, _, made in self.work:  # a device has computed nothing yet
            for tensor in () if aliases(func) else _tensors(made):
                if tensor.is_floating_point():
                    tensor.fill_(math.nan)
        return results

    def note(self, func: Any, name: str, host: Any, made: Any) -> None:
        """Keep an operation with the memory that it reads and writes."""
        self.work.append((func, name, host, made))

    def replay(self) -> None:
        for one in tallies:
            one.add("graph", 0)
        for func, name, host, made in self.work:
            again = run_on_host(func, name, *host)
            for mine, new in (
                () if aliases(func) else zip(_tensors(made), _tensors(again), strict=True)
            ):
                mine.copy_(new)


def _tensors(found: Any) -> list[Tensor]:
    return [x for x in tree_leaves(found) if isinstance(x, Tensor)]


def graphs(
    monkeypatch: pytest.MonkeyPatch, graph: Callable[[torch.device], replay.Graph] = RecordedGraph
) -> None:
    """Let the simulated device have graphs for the time of a test."""
    monkeypatch.setitem(replay.GRAPHS, NAME, graph)
    monkeypatch.setattr(replay, "_refused", set())
