"""What several processes check together; ``tests/test_devices.py`` starts them."""

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed

from aespa_pl.algorithm.adaround import SoftRounding, rounding_loss
from aespa_pl.block.preparation import fit_block_grids, prepare_rounding
from aespa_pl.distributed.launch import LAUNCHER, end_with_launcher
from aespa_pl.distributed.processes import ALONE, Ranks
from aespa_pl.distributed.rows import Shard
from aespa_pl.rounding import BlockRounding, StatisticsBatch
from tests.rounding.test_module import SETTINGS, problem
from tests.test_preparation import FEW, make_problem


def main(arguments: Sequence[str]) -> None:
    """Join the process group and run one of the functions below."""
    distributed.init_process_group(
        "gloo",
        rank=int(os.environ["LOCAL_RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=60),
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same numbers in all processes
    globals()[arguments[0]](Ranks.current(torch.device("cpu")))
    sys.stdout.write(f"{arguments[0]}: right\n")


def sums_and_parts(ranks: Ranks) -> None:
    everyone = range(ranks.count)
    with torch.inference_mode():
        made = torch.full((2,), float(ranks.rank))
    ranks.sum_(made)
    assert made.tolist() == [sum(everyone)] * 2
    assert ranks.sum(ranks.rank + 0.5) == sum(everyone) + ranks.count / 2
    assert ranks.largest(-ranks.rank) == 0
    assert ranks.from_first(lambda: {"rank": ranks.rank}) == {"rank": 0}
    for size in (0, 1, ranks.count - 1, ranks.count, ranks.count + 1, 3 * ranks.count - 1):
        whole = torch.randint(0, 9, (size, 3), dtype=torch.uint8)
        assert torch.equal(ranks.gather(whole[ranks.share(size)], size), whole)


def shards_make_the_whole(ranks: Ranks) -> None:
    for heads, rows, by_heads in ((4, 3, True), (4, 3, False), (1, 2, False), (1, 2, True)):
        shard = Shard(heads, rows, by_heads, ranks)
        whole = torch.randn(heads, rows, 5)
        part = shard.part(whole)
        assert part.numel() > 0
        assert torch.equal(shard.whole(part), whole)
        assert ranks.sum(shard.fraction) == pytest.approx(1)
        assert shard.sum(1.0) == min(ranks.count, heads if by_heads else heads * rows)
        many = torch.randn(heads, 5, 5)
        assert shard.of_heads(many).shape[0] == (part.shape[0] if by_heads else heads)
        assert shard.of_heads(many[:1]).shape[0] == 1


def errors_are_everybodys(ranks: Ranks) -> None:
    def work() -> None:
        if ranks.rank == ranks.count - 1:
            raise ArithmeticError("of the last")

    with pytest.raises(ArithmeticError, match=r"^of the last$"), ranks.failing_together():
        work()
    with ranks.failing_together():
        pass


def preparation_is_that_of_one(ranks: Ranks) -> None:
    problem = make_problem("llama-grouped")
    expected = prepare_rounding(problem, fit_block_grids(problem, FEW), FEW)
    found = prepare_rounding(problem, fit_block_grids(problem, FEW, ranks), FEW, ranks)
    assert expected.keys() == found.keys()
    for name, one in expected.items():
        for kind in ("scale", "zero_point", "zeta"):
            torch.testing.assert_close(getattr(found[name].grid, kind), getattr(one.grid, kind))
        torch.testing.assert_close(found[name].updated, one.updated)
        assert torch.equal(found[name].integers, one.integers)
        assert found[name].integers.dtype == one.integers.dtype
    assert ranks.traffic.bytes > 0
    assert ALONE.traffic.bytes == 0


def factorization_that_fails_in_one_fails_in_all(ranks: Ranks) -> None:
    problem = make_problem("llama-grouped")
    grids = fit_block_grids(problem, FEW)
    problem.hessians["v_proj"][-1].fill_(torch.nan)  # a head of one process
    with pytest.raises(ArithmeticError, match="v_proj: the Hessian cannot be factored"):
        prepare_rounding(problem, grids, FEW, ranks)


def curves_are_of_all_rows(ranks: Ranks) -> None:
    tasks, batch = problem()
    shards = {n: Shard.of(task.start, *batch[n], ranks) for n, task in tasks.items()}
    parts, batch_part = {}, {}
    for name, shard in shards.items():
        task, (H, G) = tasks[name], batch[name]
        r = task.rounding
        fixed = SoftRounding(shard.part(r.lower), shard.part(r.base), shard.part(r.gain), r.levels)
        parts[name] = replace(
            task, rounding=fixed, start=shard.part(task.start), nearest=shard.part(task.nearest)
        )
        batch_part[name] = shard.of_heads(H), None if G is None else shard.of_heads(G)
    module = BlockRounding(parts, SETTINGS, "block 0", shards)
    found = module._of_all_rows(curves(module, batch_part))
    expected = curves(BlockRounding(tasks, SETTINGS, "block 0"), batch)
    assert list(found) == list(expected)
    for curve, value in expected.items():
        torch.testing.assert_close(found[curve], value)


def curves(module: BlockRounding, batch: StatisticsBatch) -> dict[str, Tensor]:
    losses = {
        name: rounding_loss(
            B.detach(), module.rounding(name), *batch[name], weight=module.penalties[name], beta=8.0
        )
        for name, B in module.variables.items()
    }
    return module._curves(losses)


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
