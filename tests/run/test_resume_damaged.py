"""A stopped run whose files were damaged does again what they held, and ends with the same bytes."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from aespa_pl.run.journal import Run
from tests.disks import flip, truncate
from tests.run.bench import LAST, Bench, check, checkpoint_of, copied, remove
from tests.walks import BLOCKS

BLOCK, SHARD = "blocks/block_000.safetensors", "model/model-00002-of-00003.safetensors"


@pytest.mark.parametrize(("file", "damage"), [(BLOCK, truncate), (SHARD, flip), (SHARD, remove)])
def test_damaged_block_is_named_and_done_again(
    file: str, damage: Callable[[Path], None], bench: Bench, stopped: Path, whole: dict[str, bytes]
) -> None:
    name = f"{damage.__name__}_{Path(file).name}"
    run = copied(stopped, bench, name)
    damage(run / file)
    outcome = bench.fit(name, *LAST)
    message = f"block 0 of {BLOCKS}: {run / file} is damaged or missing: the block is quantized again"
    assert message in outcome.text.splitlines()
    check(bench, name, outcome, whole)


def test_finished_run_whose_repair_is_killed_is_mended_at_the_next_start(
    bench: Bench, whole: dict[str, bytes]
) -> None:
    run = copied(bench.run_of("whole"), bench, "killed_repair")
    for index in range(BLOCKS):
        remove(run / f"blocks/block_{index:03}.safetensors")
    killed = bench.fit("killed_repair", *LAST, number=signal.SIGKILL, when="*/checkpoints/block_001/*.ckpt")
    assert killed.status == -signal.SIGKILL, killed.text
    left = Run.open(run)
    assert sorted(left.blocks) == [0]
    assert not left.metrics_file.exists()  # so test refuses it
    assert not left.model  # so export does
    check(bench, "killed_repair", bench.fit("killed_repair", *LAST), whole)
    assert Run.open(run).damage() == ""


@pytest.mark.parametrize("damage", [truncate, remove])
def test_damaged_checkpoint_is_named_and_not_used(
    damage: Callable[[Path], None], bench: Bench, stopped: Path, whole: dict[str, bytes]
) -> None:
    name = f"{damage.__name__}_checkpoint"
    run = copied(stopped, bench, name)
    file = run / bench.journal(name)["checkpoint"]["file"]
    damage(file)
    outcome = bench.fit(name, *LAST)
    assert f"block 1: {file} is damaged or missing: it is not used" in outcome.text.splitlines()
    check(bench, name, outcome, whole)


def test_checkpoint_of_a_newer_lightning_is_used(
    bench: Bench, stopped: Path, whole: dict[str, bytes]
) -> None:
    """The file is like one after a downgrade; its content counts."""
    name = "newer_lightning"
    run = copied(stopped, bench, name)
    with checkpoint_of(run) as content:
        content["pytorch-lightning_version"] = "99.0.0"
    check(bench, name, bench.fit(name, *LAST), whole)
