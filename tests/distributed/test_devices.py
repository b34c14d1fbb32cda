"""Several processes find what one process finds, however they are started (gloo on the CPU)."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import peers
from tests.distributed.bench import LAST, MANY, TWO, Bench, Whole
from tests.walks import BLOCKS

SECONDS = 480
"""Seconds for a command line of its own, in which two processes import PyTorch."""


def command(arguments: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    """Run python with these arguments."""
    known = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    clean = {key: value for key, value in os.environ.items() if key not in known}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=Path(__file__).parents[2],
        env={**clean, "OMP_NUM_THREADS": "1", "COLUMNS": "500"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


FAST = "--quantization.method=aespa-fast"
CHECKS = [
    peers.sums_and_parts,
    peers.shares_make_the_whole,
    peers.errors_are_everybodys,
    peers.steps_are_those_of_one,
    peers.factorization_that_fails_in_one_fails_in_all,
    peers.curves_are_of_all_rows,
    peers.tuning_is_that_of_one,
]


def test_pieces(bench: Bench) -> None:
    checks = [check.__name__ for check in CHECKS]
    outcome = bench.forks.run(checks, processes=MANY, target="tests.peers:main")
    for text in outcome.texts:
        right = [line for line in text.splitlines() if line.endswith(": right")]
        assert right == [f"{check}: right" for check in checks], "\n".join(outcome.texts)


def test_lightning_starts_them(bench: Bench, whole: Whole) -> None:
    """The first process starts the second, when a user types the command."""
    outcome = command(["-m", "aespa_pl", *bench.arguments("two", FAST, *TWO)])
    assert outcome.returncode == 0, outcome.stderr
    lines = outcome.stdout.splitlines()
    assert lines[-1] == str(bench.run("two"))
    assert len([line for line in lines if line.startswith("block ")]) == BLOCKS  # the first speaks
    lines = [x for x in outcome.stderr.splitlines() if x.startswith("aespa-pl:")]
    assert [x for x in lines if "waiting for 2 processes" not in x] == []  # on a slow machine
    bench.check("two", like=whole(FAST))


HYBRID = ("--quantization.method=aespa-hybrid", "--data.hidden_states=disk")
SLURM = {
    "SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "quantize", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_NODEID": "0", "SLURM_PROCID": "{rank}", "SLURM_LOCALID": "{rank}",
    "SLURM_JOB_NODELIST": "localhost",
}  # fmt: skip
LAYER = ("--quantization.objective.query_key=layer", "--quantization.objective.value=layer")


PARTS = ("--data.memory_gb=1e-6", "--quantization.rounding.iterations=4")
"""Memory so small that everything is done in portions."""


@pytest.mark.parametrize(
    ("options", "processes"),
    [
        (LAYER, 2),
        (("--quantization.method=awq",), 2),
        (HYBRID, MANY),  # the last process has no row of any projection
        (PARTS, 2),
    ],
)
def test_they_find_what_one_finds(
    options: tuple[str, ...], processes: int, bench: Bench, whole: Whole
) -> None:
    like = whole(*options)
    outcome = bench.fit(f"{like}_{processes}", *options, processes=processes)
    assert outcome.status == 0, "\n".join(outcome.texts)
    assert outcome.texts[1:] == [""] * (processes - 1)
    bench.check(f"{like}_{processes}", like)


def test_slurm_starts_them(bench: Bench, whole: Whole) -> None:
    """Only the environment is SLURM's, which itself is not installed here."""
    outcome = bench.fit("slurm", FAST, processes=2, environment=SLURM)
    assert outcome.status == 0, "\n".join(outcome.texts)
    bench.check("slurm", like=whole(FAST))


def test_other_number_of_processes_is_refused(bench: Bench) -> None:
    outcome = bench.fit("number", "--trainer.devices=3", environment=SLURM)
    assert outcome.status == 2, outcome.text
    (line,) = outcome.text.splitlines()
    assert line.startswith("aespa-pl: trainer: ")


def test_mistake_is_told_once(bench: Bench, whole: Whole) -> None:
    outcome = bench.fit(whole(), *LAST, "--quantization.bits=3", processes=2)
    assert outcome.status == 2
    (line,) = outcome.text.splitlines()
    assert line.startswith("aespa-pl: ")
    assert outcome.texts[1] == ""


def test_process_ends_with_the_one_that_started_it(bench: Bench) -> None:
    outcome = bench.forks.run([str(bench.folder / "pid")], target="tests.peers:dies_of_a_kill")
    assert outcome.status == -signal.SIGKILL
    state = Path("/proc") / (bench.folder / "pid").read_text() / "stat"
    until = time.monotonic() + 20
    while state.exists() and state.read_text().split()[2] != "Z":
        assert time.monotonic() < until
        time.sleep(0.05)


def test_perplexity_is_that_of_one(bench: Bench, whole: Whole) -> None:
    run = bench.run(whole())
    arguments = bench.arguments(whole(), "--trainer.devices=2")
    outcome = bench.forks.run(["test", *arguments[1:]], processes=2)
    assert outcome.status == 0, "\n".join(outcome.texts)
    metrics, measured = (json.loads((run / f"{n}.json").read_text()) for n in ("metrics", "test"))
    for kind, texts in metrics["perplexity"].items():
        assert measured["perplexity"][kind] == pytest.approx(texts, rel=1e-5)
