"""Divide work among the processes of a run, one for each device, and put the results together.

Whatever is not divided is the same in all of them. One process alone communicates with nobody: each
method then returns its argument.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch
from torch import Tensor, distributed

from aespa_pl.errors import EndedError, NumericalError

T = TypeVar("T")


class PeerLostError(EndedError):
    """Says that another process of the run has ended, or cannot be reached."""

    def __init__(self, reason: object) -> None:  # if a mistake was made, that process reports it
        super().__init__(f"another process of this run has ended or cannot be reached: {reason}", status=1)


@dataclass(frozen=True)
class World:
    """Knows this process among all of the run, which have to make the same calls in the same order."""

    rank: int = 0
    size: int = 1  # number of processes
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # tensors have to be on it

    @property
    def alone(self) -> bool:
        """Tell whether this is the only process."""
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """Tell whether this is the process that writes and speaks."""
        return self.rank == 0

    def indices(self, count: int, rank: int | None = None) -> slice:
        """Return the indices among ``count`` things that a process, by default this one, works on."""
        # neighbours stay together; the first processes may have one more than others, which may have none
        rank = self.rank if rank is None else rank
        each, more = divmod(count, self.size)
        start = rank * each + min(rank, more)
        return slice(start, start + each + (rank < more))

    def segments(self, tokens: Tensor, batch_size: int) -> Tensor:
        """Return the segments ``[segments, L]`` that this process works on; there may be none."""
        # whole batches, so that every batch is the one that a process alone would run
        mine = self.indices(math.ceil(len(tokens) / batch_size))
        return tokens[mine.start * batch_size : mine.stop * batch_size]

    def sum_(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over the processes, which is the same in all of them."""
        if not self.alone:
            # inference mode, because tensors that were made in it cannot be changed outside of it
            with _peers(), torch.inference_mode():
                distributed.all_reduce(tensor)

    def sum(self, number: float) -> float:
        """Return the sum of a number over the processes."""
        return self._reduced(number, "SUM")

    def largest(self, number: float) -> float:
        """Return the largest of the processes' numbers."""
        return self._reduced(number, "MAX")

    def smallest(self, number: float) -> float:
        """Return the smallest of the processes' numbers."""
        return self._reduced(number, "MIN")

    def _reduced(self, number: float, operation: str) -> float:
        if self.alone:
            return number
        result = torch.tensor(number, dtype=torch.float64, device=self.device)
        with _peers():
            distributed.all_reduce(result, getattr(distributed.ReduceOp, operation))
        return float(result)

    def gather(self, part: Tensor, count: int) -> Tensor:
        """Return the tensor ``[count, ...]`` of which each process has the rows ``indices(count)``."""
        if self.alone:
            return part
        most = math.ceil(count / self.size)
        padded = part.new_zeros(most, *part.shape[1:])  # all have to send the same number
        padded[: len(part)] = part
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        with _peers():
            distributed.all_gather(parts, padded)
        slices = (self.indices(count, rank) for rank in range(self.size))
        return torch.cat([p[: s.stop - s.start] for p, s in zip(parts, slices, strict=True)])

    def from_first(self, make: Callable[[], T]) -> T:
        """Return what ``make`` returns in the first process, the only one that calls it."""
        if self.alone:
            return make()
        made = [make() if self.is_first else cast(T, None)]
        with _peers():
            distributed.broadcast_object_list(made, device=self.device)
        return made[0]

    def wait_for_all(self) -> None:
        """Return once all processes have come here."""
        self.largest(0)

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Raise a NumericalError of any process in all of them, because the next step needs everybody."""
        if self.alone:
            yield
            return
        message: str | None = None
        try:
            yield
        except NumericalError as error:
            message = str(error)
        messages: list[str | None] = [None] * self.size
        with _peers():
            distributed.all_gather_object(messages, message)
        if raised := next(filter(None, messages), None):
            raise NumericalError(raised)


ALONE = World()


@dataclass(frozen=True)
class RowShare:
    """Takes one process's rows of tensors ``[heads, rows, ...]``, and puts the rows of all together.

    Rows that share one Hessian don't depend on each other. Those of a head stay together where G couples
    them, or where the head has a Hessian of its own. A process for which no rows are left (there may be more
    processes than heads) works on the first, and its result is dropped: so no shape is empty.
    """

    heads: int
    rows: int
    by_heads: bool  # whether whole heads are divided; otherwise single rows are
    world: World = ALONE

    @property
    def fraction(self) -> float:
        """Return the share of all rows that this process answers for; 0 if it only works along."""
        return len(self._own) / self._size

    @property
    def taken_heads(self) -> slice:
        """Return the heads that this process works on; all of them where single rows are divided."""
        return self._taken if self.by_heads else slice(0, self.heads)

    def part(self, tensor: Tensor) -> Tensor:
        """Return this process's part of ``[heads, rows, ...]``; single rows count as one head."""
        if self.world.alone:
            return tensor
        return tensor[self._taken] if self.by_heads else tensor.flatten(0, 1)[self._taken][None]

    def whole(self, part: Tensor) -> Tensor:
        """Return ``[heads, rows, ...]`` from the parts of all processes."""
        if self.world.alone:
            return part
        own = (part if self.by_heads else part[0])[: len(self._own)]
        return self.world.gather(own, self._size).view(self.heads, self.rows, *part.shape[2:])

    def sum(self, number: float) -> float:
        """Return the sum over the processes of a number that each has for its own rows."""
        return number if self.world.alone else self.world.sum(number if self.fraction else 0.0)

    @property
    def _size(self) -> int:
        return self.heads if self.by_heads else self.heads * self.rows

    @property
    def _own(self) -> range:
        return range(self._size)[self.world.indices(self._size)]

    @property
    def _taken(self) -> slice:
        return slice(self._own.start, self._own.stop) if self._own else slice(0, 1)


@contextmanager
def _peers() -> Iterator[None]:
    """Name the likely cause of a failed call."""
    try:
        yield
    except RuntimeError as error:  # gloo's and NCCL's alike
        raise PeerLostError(error) from error
