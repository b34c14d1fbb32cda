"""A model whose blocks are read when they run: the next is read meanwhile, and everything else is torch's."""

from collections.abc import Mapping
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aespa_pl.errors import UserError
from aespa_pl.tuning.streamed import TrainableStream

BLOCKS, SIZE, WAIT = 4, 3, 10.0


class Disk:
    """Has the weights of a chain of linear layers, and tells when the reading of each has begun."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.weights = [torch.randn(SIZE, SIZE) for _ in range(BLOCKS)]
        self.begun = [Event() for _ in range(BLOCKS)]
        self.damaged: int | None = None
        self.ran: list[int] = []
        self.towards = 1

    def read(self, index: int) -> dict[str, Tensor]:
        self.begun[index].set()
        if index == self.damaged:
            raise UserError(f"block {index} is damaged")
        return {"weight": self.weights[index].clone()}

    def make(self, index: int, stored: Mapping[str, Tensor]) -> nn.Module:
        layer = nn.Linear(SIZE, SIZE, bias=False)
        layer.weight.data = stored["weight"]
        layer.index = index  # type: ignore[assignment]
        return layer

    def run_block(self, block: Any, hidden: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        """Run a block that ends only after the reading of the next one has begun."""
        following = block.index + self.towards
        if 0 <= following < BLOCKS:
            assert self.begun[following].wait(WAIT), f"{following} is not read while {block.index} runs"
        self.ran.append(block.index)
        return torch.tanh(block(hidden))

    def stream(self) -> TrainableStream:
        model = nn.Module()
        model.layers = nn.ModuleList(nn.Identity() for _ in range(BLOCKS))
        family: Any = SimpleNamespace(
            blocks_path="layers",
            embed=lambda _, ids: (ids.float(), {}),
            arguments=lambda _, hidden: {},
            run_block=self.run_block,
        )
        stream = TrainableStream(model, family, self.read, self.make)
        for event in self.begun:
            event.clear()
        return stream


def test_the_next_block_is_read_while_one_runs_and_gradients_are_autograds() -> None:
    disk, ids = Disk(), torch.randn(2, 5, SIZE)
    stream = disk.stream()
    found = stream(ids)
    assert disk.ran == [0, 0, 1, 1, 2, 2, 3, 3]  # segment by segment
    disk.towards, disk.ran = -1, []
    for event in disk.begun:
        event.clear()
    found.square().sum().backward()
    assert disk.ran == [3, 3, 2, 2, 1, 1, 0, 0]

    weights = [weight.clone().requires_grad_() for weight in disk.weights]
    expected = ids
    for weight in weights:
        expected = torch.tanh(expected @ weight.T)
    expected.square().sum().backward()
    torch.testing.assert_close(found, expected)
    for block, weight in zip(stream.blocks, weights, strict=True):
        torch.testing.assert_close(block.get_parameter("weight").grad, weight.grad)


def test_an_error_of_the_reading_is_raised_where_the_block_is_needed() -> None:
    disk = Disk()
    stream = disk.stream()
    disk.damaged = 2
    with pytest.raises(UserError, match="block 2 is damaged"):
        stream(torch.randn(1, 5, SIZE))
    assert disk.ran == [0, 1]
