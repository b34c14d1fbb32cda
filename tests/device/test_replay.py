"""Functions repeated by a graph: right results, few launches, and no graph that isn't proven."""

import logging
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from aespa_pl.algorithm import replay
from aespa_pl.algorithm.descent import descend
from aespa_pl.algorithm.optq import LAZY_COLUMNS, update_weights
from aespa_pl.algorithm.quantizer import Grid, quantize
from aespa_pl.algorithm.replay import CudaGraph, Replayed
from tests.device.graphs import RecordedGraph, graphs
from tests.device.problems import Problem, problem
from tests.device.simulated import simulated, strategy
from tests.device.streams import NAME
from tests.device.tally import counting
from tests.rounding import problems as projections


def chain(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Many small kernels: some change memory in place, some make new memory or views."""
    total, kept = x.clone(), torch.empty_like(x)
    for j in range(x.shape[-1]):
        column = total[:, j]
        total[:, j + 1 :] -= (column.round() * y[:, j])[:, None]
        kept[:, j] = column
    return total @ y.T, kept


def pairs(device: torch.device, count: int = 5) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(6, 4).to(device), torch.randn(6, 4).to(device)) for _ in range(count)]


def assert_right(replayed: Replayed, given: list[tuple[Tensor, Tensor]]) -> None:
    for x, y in given:
        found, expected = replayed(x, y), chain(x, y)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_graph_repeats_the_function_on_other_inputs_with_one_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with simulated(monkeypatch) as device:
        graphs(monkeypatch)
        replayed = Replayed(chain, "a test")
        assert_right(replayed, pairs(device))
        (x, y), *_ = pairs(device)
        with counting() as found:
            replayed(x, y)
        assert found.kernels == {"_foreach_copy_": 1, "graph": 1}  # the inputs, and all the rest
        assert not found.waits
        few = (x[:3], y[:3])  # other shapes have a graph of their own
        assert_right(replayed, [few, few, few, (x, y)])


def test_without_graphs_the_function_runs_as_it_is() -> None:
    assert_right(Replayed(chain, "a test"), pairs(torch.device("cpu")))


class WrongGraph(RecordedGraph):
    """Forgets the last operation."""

    def replay(self) -> None:
        self.work = self.work[:-1]
        super().replay()


class NoGraph(RecordedGraph):
    """Can't be captured."""

    def capture(self, function: object) -> tuple[Tensor, ...]:
        raise RuntimeError("operation not permitted when stream is capturing")


class EmptyGraph(RecordedGraph):
    """Forgets all."""

    def replay(self) -> None:
        self.work = []


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (EmptyGraph, "its result differs from that of single kernels"),
        (WrongGraph, "its result differs from that of single kernels"),
        (NoGraph, "operation not permitted when stream is capturing"),
    ],
)
def test_a_graph_that_is_not_right_is_not_used(
    graph: type[RecordedGraph],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with simulated(monkeypatch) as device, caplog.at_level(logging.WARNING):
        graphs(monkeypatch, graph)
        assert_right(Replayed(chain, "a test"), pairs(device))
        assert_right(Replayed(chain, "a test"), pairs(device))
    (record,) = caplog.records  # said once
    assert record.getMessage().endswith(reason)


@pytest.mark.parametrize("graph", [RecordedGraph, EmptyGraph, WrongGraph, NoGraph])
def test_a_function_with_memory_of_its_own_is_right_each_time(
    graph: type[RecordedGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    with simulated(monkeypatch) as device:
        graphs(monkeypatch, graph)
        learned, meanwhile, result = (torch.randn(6, 4).to(device) for _ in range(3))

        def write(factor: Tensor) -> tuple[Tensor]:
            torch.mul(learned, factor, out=meanwhile)
            torch.add(meanwhile, 1, out=result)
            return (result,)

        replayed = Replayed(write, "a test")
        for step in range(5):
            learned += 1  # as Adam does
            (found,) = replayed(torch.tensor(float(step)).to(device))
            assert torch.equal(found, learned * step + 1)
        assert ((NAME, "a test") in replay._refused) == (graph is not RecordedGraph)


def test_a_function_that_reads_a_number_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def reading(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return chain(x * float(y.sum()), y)

    with simulated(monkeypatch) as device:
        graphs(monkeypatch)
        replayed = Replayed(reading, "a test")
        for x, y in pairs(device):
            found, expected = replayed(x, y), reading(x, y)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def integers_of(given: Problem) -> dict[str, Tensor]:
    nearest = quantize(given.W, given.grid)
    return {
        "optq": update_weights(given.W, given.H, given.grid)[1],
        "rows": descend(nearest, given.W, given.grid, given.H, passes=3).integers,
        "coupled": descend(nearest, given.W, given.grid, given.H, given.G, passes=3).integers,
    }


def test_integers_are_those_without_graphs_with_few_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    columns = 5 * LAZY_COLUMNS + 32
    with simulated(monkeypatch) as device:
        given = problem(device, rows=48, columns=columns)
        with counting() as plain:
            expected = integers_of(given)
        graphs(monkeypatch)
        with counting() as launched:
            found = integers_of(given)
        assert launched.kernels["graph"] > 10
        assert launched.count < plain.count / 2
        for name, integers in found.items():
            assert torch.equal(integers, expected[name]), name
        with counting() as optq:
            update_weights(given.W, given.H, given.grid)
        # single kernels: the first chunk, the second one beside its graph, and the last, which is smaller
        assert optq.count < 16 * (2 * LAZY_COLUMNS + LAZY_COLUMNS + 32)


def learned(
    device: torch.device, given: Mapping[str, projections.Problem], **options: Any
) -> dict[str, Tensor]:
    """Return the rounding variables after a training on the device, with options of a Trainer."""
    there = {
        name: projections.Problem(
            p.weight.to(device),
            Grid(p.grid.scale.to(device), p.grid.zero_point.to(device), p.grid.zeta.to(device), 2),
            p.penalty,
            p.H.to(device),
            None if p.G is None else p.G.to(device),
        )
        for name, p in given.items()
    }
    module, found = projections.module_of(there), projections.Learned()
    trainer = projections.trainer(devices=1, callbacks=[found], **options)
    trainer.fit(module, datamodule=projections.data_of(there))
    return {name: B.cpu() for name, B in found.variables.items()}


def test_learning_is_that_without_graphs_with_few_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = projections.problems()
    with simulated(monkeypatch) as device:
        options = {"accelerator": "auto", "strategy": strategy()}
        with counting() as plain:
            expected = learned(device, given, **options)
        graphs(monkeypatch)
        with counting() as launched:
            found = learned(device, given, **options)
    iterations, curves = projections.SETTINGS.iterations, projections.SETTINGS.iterations // 10
    for name, B in found.items():
        assert torch.equal(B, expected[name]), name
        assert not torch.equal(B, given[name].start[1])
    # before and after the warm-up, the first iteration of each is launched kernel by kernel
    assert launched.kernels["graph"] == len(given) * (iterations - curves - 2)
    assert launched.count < plain.count


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_repeats_the_function() -> None:
    device = torch.device("cuda")
    replayed = Replayed(chain, "a test")
    assert_right(replayed, pairs(device))
    graph = next(captured.graph for captured in replayed._seen.values() if captured is not None)
    assert isinstance(graph, CudaGraph)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_learns_what_a_cpu_learns() -> None:
    given = projections.problems()
    expected = learned(torch.device("cpu"), given)
    for name, B in learned(torch.device("cuda"), given, accelerator="cuda").items():
        torch.testing.assert_close(
            B, expected[name], rtol=0, atol=1e-2
        )  # Adam enlarges rounding errors
    assert ("cuda", "learning") not in replay._refused
