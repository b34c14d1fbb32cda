"""Several processes find what one process finds, however they are started (gloo on the CPU)."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import peers
from tests.forks import Forks, Outcome
from tests.models.examples import LENGTH
from tests.walks import BLOCKS, SEGMENTS, save_short

ITERATIONS, EVERY = 40, 8
"""Iterations of each block, and between two checkpoints."""
ONCE = 21
"""A number of iterations of which a block has only one multiple."""
LAST = ("--ckpt_path", "last")
TWO = ("--trainer.devices=2", "--trainer.strategy=ddp")
SECONDS = 480
"""Seconds for a command line of its own, in which two processes import PyTorch."""
MANY = 5
"""Number of processes, more than batches (2), key/value heads (2) and query heads (4)."""


@dataclass(frozen=True)
class Bench:
    """Has a small model, and runs it."""

    folder: Path
    forks: Forks

    def arguments(self, name: str, *more: str) -> list[str]:
        words = self.folder / "words.txt"
        options: dict[str, Any] = {
            "model.pretrained": self.folder / "model",
            "data.calibration.source": words,
            "data.calibration.segments": SEGMENTS,
            "data.calibration.segment_length": LENGTH,
            "data.evaluation.texts": [str(words)],
            "data.evaluation.max_segments": 5,
            "data.evaluation.round_to_nearest": "false",
            "data.batch_size": 4,
            "data.cache": self.folder / "cache",
            "quantization.grid.max_rounds": 2,
            "quantization.method": "aespa",
            "quantization.rounding.iterations": ITERATIONS,
            "quantization.rounding.learning_rate": 0.05,
            "output.folder": self.folder / "runs",
            "output.name": name,
            "output.checkpoint_iterations": EVERY,
            "trainer.accelerator": "cpu",
            "trainer.log_every_n_steps": 10,
        }
        return ["fit", *(f"--{key}={value}" for key, value in options.items()), *more]

    def fit(self, name: str, *more: str, processes: int = 1, **how: Any) -> Outcome:
        """Run ``fit`` in forks; ``when`` is a glob in the folder of the name's run."""
        if "when" in how:
            how["when"] = str(self.run(name) / how["when"])
        if processes > 1:
            more = (f"--trainer.devices={processes}", *more)
        return self.forks.run(self.arguments(name, *more), processes=processes, **how)

    def run(self, name: str) -> Path:
        return self.folder / "runs" / name / "version_0"

    def journal(self, name: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.run(name) / "journal.json").read_text())
        return content

    def check(self, name: str, like: str) -> None:
        """Check that a run has found what another one has."""
        losses, expected_losses = (self.journal(n)["blocks"] for n in (name, like))
        for index in range(BLOCKS):
            file = f"blocks/block_{index:03}.safetensors"
            found, expected = (load_file(self.run(n) / file) for n in (name, like))
            assert found.keys() == expected.keys()
            integers = [key for key in expected if key.endswith(".integers")]
            equal = sum(int((found[key] == expected[key]).sum()) for key in integers)
            assert equal >= 0.999 * sum(expected[key].numel() for key in integers)
            for projection, loss in expected_losses[str(index)]["losses"].items():
                final = losses[str(index)]["losses"][projection]["final"]
                assert final == pytest.approx(loss["final"], rel=1e-3), projection
        metrics, expected_metrics = (
            json.loads((self.run(n) / "metrics.json").read_text()) for n in (name, like)
        )
        assert metrics.keys() == expected_metrics.keys()
        for kind, texts in expected_metrics["perplexity"].items():
            assert metrics["perplexity"][kind] == pytest.approx(texts, rel=1e-3)
        assert not (self.run(name) / "checkpoints").exists()


@pytest.fixture(scope="module")
def bench(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("bench")
    save_short("llama-grouped", folder / "model")
    return Bench(folder, forks)


Whole = Callable[..., str]


@pytest.fixture(scope="module")
def whole(bench: Bench) -> Whole:
    """Does the runs of one process, each set of options once."""
    done: dict[Sequence[str], str] = {}

    def get(*options: str) -> str:
        if options not in done:
            done[options] = f"one_{len(done)}"
            outcome = bench.fit(done[options], *options)
            assert outcome.status == 0, outcome.text
        return done[options]

    return get


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


CHECKS = [
    peers.sums_and_parts,
    peers.shares_make_the_whole,
    peers.errors_are_everybodys,
    peers.steps_are_those_of_one,
    peers.factorization_that_fails_in_one_fails_in_all,
    peers.curves_are_of_all_rows,
    peers.tuning_is_that_of_one,
]


@pytest.mark.parametrize("processes", [3, MANY])
def test_pieces(processes: int, bench: Bench) -> None:
    checks = [check.__name__ for check in CHECKS]
    outcome = bench.forks.run(checks, processes=processes, target="tests.peers:main")
    for text in outcome.texts:
        right = [line for line in text.splitlines() if line.endswith(": right")]
        assert right == [f"{check}: right" for check in checks], "\n".join(outcome.texts)


def test_lightning_starts_them(bench: Bench, whole: Whole) -> None:
    """The first process starts the second, when a user types the command."""
    outcome = command(["-m", "aespa_pl", *bench.arguments("two", *TWO)])
    assert outcome.returncode == 0, outcome.stderr
    lines = outcome.stdout.splitlines()
    assert lines[-1] == str(bench.run("two"))
    assert len([line for line in lines if line.startswith("block ")]) == BLOCKS  # the first speaks
    lines = [x for x in outcome.stderr.splitlines() if x.startswith("aespa-pl:")]
    assert [x for x in lines if "waiting for 2 processes" not in x] == []  # on a slow machine
    bench.check("two", like=whole())


HYBRID = ("--quantization.method=aespa-hybrid", "--data.hidden_states=disk")
FAST = "--quantization.method=aespa-fast"
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
        ((), 2),
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


def test_checkpoint_is_that_of_one_process(bench: Bench) -> None:
    """A checkpoint has the whole block, whichever processes have learned it, up to the order of sums."""
    files, checkpoint = [], f"checkpoints/block_000/step_{ONCE}.ckpt"
    for name, processes in (("stopped_one", 1), ("stopped_two", 2)):
        once = f"--output.checkpoint_iterations={ONCE}"
        outcome = bench.fit(name, once, processes=processes, number=signal.SIGKILL, when=checkpoint)
        assert outcome.status == -signal.SIGKILL
        (file,) = bench.run(name).glob(checkpoint)
        files.append(file)
    one, two = (torch.load(file, weights_only=True) for file in files)
    assert one["global_step"] == two["global_step"]
    assert_alike(one["state_dict"], two["state_dict"])
    assert_alike(one["optimizer_states"], two["optimizer_states"])
    assert one.keys() == two.keys()
    assert one["loops"].keys() == two["loops"].keys()


def assert_alike(one: Any, two: Any) -> None:
    """Check that two nested containers are equal, tensors with a tolerance."""
    assert type(one) is type(two)
    if isinstance(one, torch.Tensor):
        assert one.is_contiguous() == two.is_contiguous()
        torch.testing.assert_close(two, one, rtol=1e-3, atol=1e-4)
    elif isinstance(one, dict):
        assert list(one) == list(two)
        for key, value in one.items():
            assert_alike(value, two[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(two)
        for x, y in zip(one, two, strict=True):
            assert_alike(x, y)
    else:
        assert one == two


@pytest.mark.parametrize(("before", "to", "after"), [(2, 1, 1), (1, 0, 2)])
def test_stopped_run_goes_on_with_another_number(
    before: int, to: int, after: int, bench: Bench, whole: Whole
) -> None:
    """The signal comes to one process, which is the second of two."""
    name = f"from_{before}_to_{after}"
    stopped = bench.fit(
        name, processes=before, number=signal.SIGTERM, to=to, when="checkpoints/block_001/*.ckpt"
    )
    assert stopped.status == 143, "\n".join(stopped.texts)
    lines = stopped.text.splitlines()
    assert lines[-1].startswith("aespa-pl: stopped by SIGTERM; continue with: aespa-pl fit")
    assert [line.split()[0] for line in lines[:-1]] == ["run", "block", "54"]
    assert stopped.texts[1:] == [""] * (before - 1)
    assert bench.journal(name)["checkpoint"]["file"].endswith("-interrupted.ckpt")
    used = bench.journal(name)["checkpoint"]["block"]
    assert used == 1
    outcome = bench.fit(name, *LAST, processes=after)
    assert outcome.status == 0, "\n".join(outcome.texts)
    assert f"1 of {BLOCKS} blocks are complete already" in outcome.text
    bench.check(name, like=whole())


TUNED = (
    "--quantization.method=aespa-tuned",
    "--data.batch_size=2",
    "--output.checkpoint_iterations=1",
)


def test_two_tune_together_and_go_on_bit_for_bit(bench: Bench) -> None:
    whole = bench.fit("tuned", *TUNED, processes=2)
    assert whole.status == 0, "\n".join(whole.texts)
    assert whole.texts[1:] == [""]
    tuning = [record["tuning"] for record in bench.journal("tuned")["blocks"].values()]
    assert all(found["error"] < found["start_error"] for found in tuning)
    when = "checkpoints/block_001/tuning/step_[2-9]*.ckpt"  # the journal has the one before
    killed = bench.fit("tuned_killed", *TUNED, processes=2, number=signal.SIGKILL, when=when)
    assert killed.status == -signal.SIGKILL
    used = bench.journal("tuned_killed")["checkpoint"]
    assert used["block"] == 1
    outcome = bench.fit("tuned_killed", *TUNED, *LAST, processes=2)
    assert outcome.status == 0, "\n".join(outcome.texts)
    for index in range(BLOCKS):
        file = f"blocks/block_{index:03}.safetensors"
        found, expected = (load_file(bench.run(n) / file) for n in ("tuned_killed", "tuned"))
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert bench.journal("tuned_killed")["tuned"] == bench.journal("tuned")["tuned"]


def test_killed_run_of_one_goes_on_with_torchrun(bench: Bench, whole: Whole) -> None:
    killed = bench.fit("torchrun", number=signal.SIGKILL, when="checkpoints/block_001/*.ckpt")
    assert killed.status == -signal.SIGKILL
    arguments = bench.arguments("torchrun", *TWO, *LAST)
    outcome = bench.forks.run(arguments, target="tests.peers:under_torchrun")
    assert outcome.status == 0, outcome.text
    assert f"1 of {BLOCKS} blocks are complete already" in outcome.text
    bench.check("torchrun", like=whole())


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
