"""A run that was killed or stopped goes on, and ends with the same bytes."""

import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.forks import Outcome
from tests.run.bench import EVERY, ITERATIONS, LAST, Bench, check, kill_at_each
from tests.walks import BLOCKS

KILLS = int(os.environ.get("AESPA_KILLS", "4"))
"""Number of kills; AESPA_KILLS asks for more."""
CHECKPOINT = "version_*/checkpoints/*/*.ckpt"


@pytest.fixture(scope="module")
def again(bench: Bench, whole: dict[str, bytes]) -> Outcome:
    """The second of two runs alike: the first takes longer, as it imports more."""
    return bench.fit("again")


def test_two_runs_are_equal(bench: Bench, whole: dict[str, bytes], again: Outcome) -> None:
    """Without this nothing below means anything."""
    check(bench, "again", again, whole)


def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(
    bench: Bench, whole: dict[str, bytes], again: Outcome
) -> None:
    choose = random.Random(0)
    kills, number, inside = 0, 0, 0
    while kills < KILLS:
        name, outcome = f"killed_{number}", Outcome(-signal.SIGKILL, 0.0, "")
        while outcome.status == -signal.SIGKILL:
            kill = signal.SIGKILL if kills < KILLS else 0
            # a busy machine may take several times the duration that was measured: half of the kills
            # wait for a checkpoint, so that some come while a block with one is under way
            when = CHECKPOINT if kills % 2 == 0 else ""
            delay = choose.uniform(0.0, 0.2 if when else 0.75) * again.seconds
            outcome = bench.fit(name, *LAST, number=kill, when=when, delay=delay)
            kills += outcome.status == -signal.SIGKILL
            inside += any((bench.runs / name).glob(CHECKPOINT))
        check(bench, name, outcome, whole)
        number += 1
    assert inside > KILLS / 5  # kills while a block was under way that had a checkpoint


MOMENTS = [
    "checkpoints/block_000/*.ckpt",
    f"checkpoints/block_000/step_{ITERATIONS}*.ckpt",
    "blocks/block_000.safetensors",
    "model/model-00002-of-00003.safetensors",
    f"checkpoints/block_001/step_{2 * EVERY}*.ckpt",
    "blocks/block_001.safetensors",
    "model/model.safetensors.index.json",
]
"""Files that have just appeared when the run is killed."""


def test_killed_at_each_of_its_writes_it_goes_on_to_the_same_bytes(
    bench: Bench, whole: dict[str, bytes]
) -> None:
    kill_at_each(bench, "writes", MOMENTS)
    check(bench, "writes", bench.fit("writes", *LAST), whole)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_stops_with_one_line_that_continues(
    number: signal.Signals, status: int, bench: Bench, whole: dict[str, bytes]
) -> None:
    name = number.name
    stopped = bench.fit(name, number=number, when="*/checkpoints/block_001/*.ckpt")
    assert stopped.status == status
    run, lines = bench.run_of(name), stopped.text.splitlines()
    command = f"aespa-pl fit --ckpt_path {run}"
    assert lines[-1] == f"aespa-pl: stopped by {name}; continue with: {command}"
    # no traceback; 54 tokens are few, and the end is estimated
    first = {line.split()[0] for line in lines[:-1]}
    assert {word for word in first if not word.isdigit()} == {"method", "run", "block", "about"}
    checkpoint = bench.journal(name)["checkpoint"]
    assert checkpoint["block"] == 1
    assert checkpoint["file"].endswith("-interrupted.ckpt")
    continued = bench.forks.run(shlex.split(command)[1:])
    assert f"1 of {BLOCKS} blocks are complete already" in continued.text
    check(bench, name, continued, whole)


def test_python_m_aespa_pl_stops_and_goes_on(bench: Bench, whole: dict[str, bytes]) -> None:
    """The same holds for a process of its own, from its first import to its exit status."""
    with subprocess.Popen(
        [sys.executable, "-m", "aespa_pl", *bench.arguments("process")],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        until = time.monotonic() + 100
        while not any((bench.runs / "process").glob("version_*/checkpoints/*/*.ckpt")):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.002)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    (line,) = errors.splitlines()
    assert line.startswith("aespa-pl: stopped by SIGTERM; continue with: aespa-pl fit --ckpt_path")
    check(bench, "process", bench.fit("process", *LAST), whole)
