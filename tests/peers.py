"""Check what only several processes together can check; ``tests/distributed/test_devices.py`` starts them."""

import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed

from aespa_pl import cli
from aespa_pl.algorithm.workspace import Workspace
from aespa_pl.block.grids import fit_grids
from aespa_pl.block.integers import polish, update
from aespa_pl.distributed.launch import LAUNCHER, end_with_launcher
from aespa_pl.distributed.processes import ALONE, RowShare, World
from aespa_pl.errors import NumericalError
from aespa_pl.rounding import BlockRounding, ProjectionRounding, StatisticsBatch
from aespa_pl.tuning.data import SegmentPairs
from aespa_pl.tuning.tune import Tuned
from tests.block.blocks import FEW, LEARNED, begin, example, gridded, make_statistics
from tests.rounding.problems import SETTINGS, module_of, problems
from tests.tuning.tuned import Example, tune_block


def main(arguments: Sequence[str]) -> None:
    """Join the process group and run functions below by their names."""
    distributed.init_process_group(
        "gloo",
        rank=int(os.environ["LOCAL_RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=60),
    )
    torch.set_num_threads(1)
    for name in arguments:
        torch.manual_seed(0)  # the same numbers in all processes
        globals()[name](World(distributed.get_rank(), distributed.get_world_size()))
        sys.stdout.write(f"{name}: right\n")


def sums_and_parts(world: World) -> None:
    everyone = range(world.size)
    with torch.inference_mode():
        made = torch.full((2,), float(world.rank))
    world.sum_(made)
    assert made.tolist() == [sum(everyone)] * 2
    assert world.sum(world.rank + 0.5) == sum(everyone) + world.size / 2
    assert world.largest(-world.rank) == 0
    assert world.from_first(lambda: {"rank": world.rank}) == {"rank": 0}
    for size in (0, 1, world.size - 1, world.size, world.size + 1, 3 * world.size - 1):
        whole = torch.randint(0, 9, (size, 3), dtype=torch.uint8)
        assert torch.equal(world.gather(whole[world.indices(size)], size), whole)


def shares_make_the_whole(world: World) -> None:
    for heads, rows, by_heads in ((4, 3, True), (4, 3, False), (1, 2, False), (1, 2, True)):
        share = RowShare(heads, rows, by_heads, world)
        whole = torch.randn(heads, rows, 5)
        part = share.part(whole)
        assert part.numel() > 0
        assert torch.equal(share.whole(part), whole)
        assert world.sum(share.fraction) == pytest.approx(1)
        assert share.sum(1.0) == min(world.size, heads if by_heads else heads * rows)
        many = torch.randn(heads, 5, 5)
        assert many[share.taken_heads].shape[0] == (part.shape[0] if by_heads else heads)


def errors_are_everybodys(world: World) -> None:
    def work() -> None:
        if world.rank == world.size - 1:
            raise NumericalError("of the last")

    with pytest.raises(NumericalError, match=r"^of the last$"), world.failing_together():
        work()
    with world.failing_together():
        pass


def steps_are_those_of_one(world: World) -> None:
    """The integers after each step of a block are the same, without Trainers."""
    one, several = (gridded("llama-grouped", LEARNED, of) for of in (ALONE, world))
    for name, p in one.projections.items():
        for kind in ("scale", "zero_point", "zeta"):
            found = getattr(several.projections[name].grid, kind)
            torch.testing.assert_close(found, getattr(p.grid, kind))
    update(one, ALONE)
    update(several, world)
    for name, p in one.projections.items():
        torch.testing.assert_close(several.projections[name].updated, p.updated)
        assert several.projections[name].integers.dtype == p.integers.dtype
        assert torch.equal(several.projections[name].integers, p.integers)
    polish(one, 2, ALONE)
    polish(several, 2, world)
    for name, p in one.projections.items():
        assert torch.equal(several.projections[name].integers, p.integers)
        assert several.projections[name].measured == pytest.approx(p.measured, rel=1e-5)


def tuning_is_that_of_one(world: World) -> None:
    """Processes with mini-batches of one segment make the steps of one with as large mini-batches as all."""

    def tuned(segments: Sequence[int], world: World) -> tuple[Example, Tuned]:
        torch.manual_seed(10)  # an example that so few segments teach something
        made = Example.make()
        inputs, targets = (torch.cat(stream)[list(segments)] for stream in (made.inputs, made.targets))
        size = len(segments) // 2  # the first half of the segments is trained on
        pairs = SegmentPairs([inputs], [targets], batch_size=size, held_back=0.5, seed=0, world=world)
        found = tune_block(made, 12, pairs=pairs)
        return made, found

    everyone = range(world.size)
    mine, found = tuned([world.rank, world.size + world.rank], world)
    one, expected = tuned([*everyone, *(world.size + rank for rank in everyone)], ALONE)
    assert found.start_error == pytest.approx(expected.start_error, rel=1e-5)
    assert found.error == pytest.approx(expected.error, rel=1e-2)
    assert found.error < 0.9 * found.start_error
    assert found.epoch == expected.epoch
    state, wanted = mine.quantized.block.state_dict(), one.quantized.block.state_dict()
    for name in wanted:
        if "norm" in name:
            torch.testing.assert_close(state[name], wanted[name], rtol=1e-2, atol=1e-3)
    learned = torch.cat([tensor.flatten() for tensor in state.values()])
    assert torch.equal(world.from_first(lambda: learned), learned)  # bit for bit the first one's


def factorization_that_fails_in_one_fails_in_all(world: World) -> None:
    block, layout = example("llama-grouped")

    def spoil(matrices: dict[str, Tensor]) -> None:
        matrices["attended"][-1][[3, 4], [4, 3]] = torch.nan  # a head of one process

    prepared = begin(block, layout, make_statistics(block, layout, change=spoil))
    fit_grids(prepared, FEW, world)
    with pytest.raises(NumericalError, match="v_proj: a matrix cannot be factored"):
        update(prepared, world)


def curves_are_of_all_rows(world: World) -> None:
    given = problems()
    parts, batch = {}, {}
    for name, p in given.items():
        heads, rows, _ = p.weight.shape
        share = RowShare(heads, rows, p.G is not None, world)
        weight = share.part(p.weight)
        parts[name] = ProjectionRounding(
            weight, weight, p.grid.merged(share.part), penalty=p.penalty, share=share
        )
        batch[name] = p.H, None if p.G is None else p.G[share.taken_heads]
    module = BlockRounding(parts, SETTINGS, "block 0")
    found = module._of_all_rows(curves(module, batch))
    expected = curves(module_of(given), {name: (p.H, p.G) for name, p in given.items()})
    assert list(found) == list(expected)
    for curve, value in expected.items():
        torch.testing.assert_close(found[curve], value)


def curves(module: BlockRounding, batch: StatisticsBatch) -> dict[str, Tensor]:
    """Return the curves of the rows of this process."""
    found = {}
    for name, projection in module.named_projections():
        loss = projection.loss(*batch[name], 8.0, Workspace())
        found[f"loss_reconstruction/{name}"] = loss.reconstruction
        found[f"loss_rounding/{name}"] = loss.penalty
        for kind, share in projection.decisions().items():
            found[f"{kind}/{name}"] = share
    return found


def under_torchrun(arguments: Sequence[str]) -> None:
    """Run a command line in two processes that torchrun's agent starts, as forks: imports take seconds."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # noqa: PLC0415  (here alone)

    agent = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="test", max_restarts=0,
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork",
    )  # fmt: skip
    elastic_launch(agent, cli.main)(list(arguments))


def dies_of_a_kill(arguments: Sequence[str]) -> None:
    """Start a process, have it write its number into a file, and be killed."""
    os.environ[LAUNCHER] = str(os.getpid())
    file = Path(arguments[0])
    if os.fork() == 0:
        end_with_launcher()
        file.with_suffix(".partial").write_text(str(os.getpid()))
        file.with_suffix(".partial").replace(file)
        time.sleep(60)
        os._exit(0)
    while not file.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
