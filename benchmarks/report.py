"""Take medians, print tables for people and write JSON lines for programs, in all benchmarks alike."""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch


def median_seconds(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the median of the seconds that some calls take, after one that warms up."""
    return median_of_each([work], repeats, device)[0]


def median_of_each(works: Sequence[Callable[[], object]], repeats: int, device: torch.device) -> list[float]:
    """Return the median of each; they take turns, so that other work of the machine meets all."""
    seconds: list[list[float]] = [[] for _ in works]
    for turn in range(repeats + 1):
        for work, taken in zip(works, seconds, strict=True):
            began = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if turn:
                taken.append(time.perf_counter() - began)
    return [statistics.median(taken) for taken in seconds]


class Report:
    """Prints a table row by row; the same rows are appended to a file."""

    def __init__(self, columns: Sequence[str], output: Path | None, **constants: Any) -> None:
        """Print the head.

        Args:
            columns: Headings.
            output: JSON lines are appended to this file.
            constants: What is the same in all of them.
        """
        self.output, self.constants = output, constants
        self._print(columns)
        self._print(["---"] * len(columns))

    def row(self, cells: Sequence[object], **values: Any) -> None:
        """Print a row, and write its values."""
        self._print(cells)
        if self.output:
            with self.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**self.constants, **values}) + "\n")

    def _print(self, cells: Sequence[object]) -> None:
        print("|", " | ".join(str(cell) for cell in cells), "|", flush=True)
