"""A run that was killed, stopped or damaged goes on, and ends with the same bytes."""

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from aespa_pl.run.fingerprint import checksum
from aespa_pl.run.versions import version_number
from tests.forks import Forks, Outcome
from tests.models.examples import LENGTH
from tests.walks import BLOCKS, SEGMENTS, save_short

KILLS = int(os.environ.get("AESPA_KILLS", "20"))
"""Number of kills; benchmarks/kills.py asks for more."""
ITERATIONS, EVERY = 40, 8
"""Iterations of each block, and between two checkpoints."""
LAST = ("--ckpt_path", "last")


@dataclass(frozen=True)
class Bench:
    """Has a small model, and runs it."""

    folder: Path
    forks: Forks

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def arguments(self, name: str, *more: str) -> list[str]:
        options: dict[str, Any] = {
            "model.pretrained": self.folder / "model",
            "data.calibration.source": self.folder / "words.txt",
            "data.calibration.segments": SEGMENTS,
            "data.calibration.segment_length": LENGTH,
            "data.evaluation.texts": [],
            "data.cache": self.folder / "cache",
            "quantization.method": "aespa",
            "quantization.rounding.iterations": ITERATIONS,
            "quantization.rounding.learning_rate": 0.05,
            "output.folder": self.runs,
            "output.name": name,
            "output.checkpoint_iterations": EVERY,
            "trainer.accelerator": "cpu",
        }
        return ["fit", *(f"--{key}={value}" for key, value in options.items()), *more]

    def fit(
        self, name: str, *more: str, number: int = 0, when: str = "", delay: float = 0.0
    ) -> Outcome:
        """Run ``fit`` in a fork; ``when`` is a glob in the folder of the name's runs."""
        when = str(self.runs / name / when) if when else ""
        return self.forks.run(self.arguments(name, *more), number, when, delay)

    def run_of(self, name: str) -> Path:
        """Return the only run of a name; of one killed before its first journal only a folder is left."""
        (journal,) = (self.runs / name).glob("version_*/journal.json")
        return journal.parent

    def journal(self, name: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.run_of(name) / "journal.json").read_text())
        return content


@pytest.fixture(scope="module")
def bench(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("bench")
    save_short("opt", folder / "model")
    return Bench(folder, forks)


@pytest.fixture(scope="module")
def whole(bench: Bench) -> dict[str, bytes]:
    """What a run leaves that nothing disturbed."""
    outcome = bench.fit("whole")
    assert outcome.status == 0, outcome.text
    found = results(bench.run_of("whole"))
    assert len(found) > 2 * BLOCKS + 4
    return found


def results(run: Path) -> dict[str, bytes]:
    """Return every file under blocks/ and model/, hidden ones as well."""
    return {
        path.relative_to(run).as_posix(): path.read_bytes()
        for folder in ("blocks", "model")
        for path in sorted((run / folder).rglob("*"))
    }


def check(bench: Bench, name: str, outcome: Outcome, whole: dict[str, bytes]) -> None:
    """Check that a run is finished, equals the undisturbed one, and left nothing else behind."""
    assert outcome.status == 0, outcome.text
    run = bench.run_of(name)
    assert outcome.text.splitlines()[-1] == str(run)
    found = results(run)
    assert sorted(found) == sorted(whole)
    assert [path for path in whole if found[path] != whole[path]] == []
    assert (run / "metrics.json").is_file()
    assert not (run / "checkpoints").exists()
    assert not list(run.glob(".*"))


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
    duration = again.seconds
    choose = random.Random(0)
    kills, number, inside = 0, 0, 0
    while kills < KILLS:
        name, outcome = f"killed_{number}", Outcome(-signal.SIGKILL, 0.0, "")
        while outcome.status == -signal.SIGKILL:
            kill = signal.SIGKILL if kills < KILLS else 0
            delay = choose.uniform(0.35, 0.75) * duration
            outcome = bench.fit(name, *LAST, number=kill, delay=delay)
            kills += outcome.status == -signal.SIGKILL
            # the machine may be busier than when the duration was measured, or less busy
            if any((bench.runs / name).glob("version_*/checkpoints/*/*.ckpt")):
                inside += 1
            elif outcome.status:
                duration *= 1.1
            elif kill:
                duration /= 1.1
        check(bench, name, outcome, whole)
        number += 1
    assert inside > KILLS / 5  # kills while a block was under way that had a checkpoint


MOMENTS = [
    "*/journal.json",
    "*/checkpoints/block_000/*.ckpt",
    f"*/checkpoints/block_000/step_{ITERATIONS}*.ckpt",
    "*/blocks/block_000.safetensors",
    "*/model/model-00002-of-00003.safetensors",
    f"*/checkpoints/block_001/step_{2 * EVERY}*.ckpt",
    f"*/checkpoints/block_001/step_{ITERATIONS}*.ckpt",
    "*/blocks/block_001.safetensors",
    "*/model/model.safetensors.index.json",
]
"""Files that have just appeared when the run is killed."""


def test_killed_at_each_of_its_writes_it_goes_on_to_the_same_bytes(
    bench: Bench, whole: dict[str, bytes]
) -> None:
    kills = 0
    for when in MOMENTS:
        outcome = bench.fit("writes", *LAST, number=signal.SIGKILL, when=when)
        # a file that was renamed before it was seen: then the run goes on to its end
        assert outcome.status in (-signal.SIGKILL, 0), f"{when}: {outcome.text}"
        kills += outcome.status == -signal.SIGKILL
        if outcome.status == 0:
            break
    check(bench, "writes", bench.fit("writes", *LAST), whole)
    assert kills > len(MOMENTS) / 2


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
    # no traceback; 54 tokens are few for the correction
    assert [line.split()[0] for line in lines[:-1]] == ["run", "block", "54"]
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
    assert errors.startswith(
        "aespa-pl: stopped by SIGTERM; continue with: aespa-pl fit --ckpt_path"
    )
    assert errors.count("\n") == 1
    check(bench, "process", bench.fit("process", *LAST), whole)


@pytest.fixture(scope="module")
def stopped(bench: Bench) -> Path:
    """A run whose first block is complete, and whose second has a checkpoint."""
    outcome = bench.fit("half", number=signal.SIGTERM, when="*/checkpoints/block_001/*.ckpt")
    assert outcome.status == 143, outcome.text
    return bench.run_of("half")


def copied(stopped: Path, bench: Bench, name: str) -> Path:
    """Return the interrupted run under another name."""
    return Path(shutil.copytree(stopped, bench.runs / name / "version_0"))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    """Change the last bit, which leaves the shapes right."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def remove(path: Path) -> None:
    path.unlink()


BLOCK, SHARD = "blocks/block_000.safetensors", "model/model-00002-of-00003.safetensors"


@pytest.mark.parametrize(("file", "damage"), [(BLOCK, truncate), (SHARD, flip), (SHARD, remove)])
def test_damaged_block_is_named_and_done_again(
    file: str,
    damage: Callable[[Path], None],
    bench: Bench,
    stopped: Path,
    whole: dict[str, bytes],
) -> None:
    name = f"{damage.__name__}_{Path(file).name}"
    run = copied(stopped, bench, name)
    damage(run / file)
    outcome = bench.fit(name, *LAST)
    message = (
        f"block 0 of {BLOCKS}: {run / file} is damaged or missing: the block is quantized again"
    )
    assert message in outcome.text.splitlines()
    check(bench, name, outcome, whole)


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


def test_checkpoint_is_used(bench: Bench, stopped: Path, whole: dict[str, bytes]) -> None:
    """The end is another with a checkpoint of other rounding variables in its place."""
    name = "other_checkpoint"
    run = copied(stopped, bench, name)
    journal = bench.journal(name)
    file = run / journal["checkpoint"]["file"]
    content = torch.load(file, weights_only=True)
    assert 0 < content["global_step"] <= ITERATIONS
    for variables in content["state_dict"].values():
        variables.neg_()
    torch.save(content, file)
    text = (run / "journal.json").read_text()
    (run / "journal.json").write_text(
        text.replace(journal["checkpoint"]["checksum"], checksum(file))
    )
    assert bench.fit(name, *LAST).status == 0
    found = results(run)
    assert found["blocks/block_000.safetensors"] == whole["blocks/block_000.safetensors"]
    assert found["blocks/block_001.safetensors"] != whole["blocks/block_001.safetensors"]


def test_checkpoint_of_a_newer_lightning_is_used(
    bench: Bench, stopped: Path, whole: dict[str, bytes]
) -> None:
    """The file is like one after a downgrade; its content counts."""
    name = "newer_lightning"
    run = copied(stopped, bench, name)
    journal = bench.journal(name)
    file = run / journal["checkpoint"]["file"]
    content = torch.load(file, weights_only=True)
    content["pytorch-lightning_version"] = "99.0.0"
    torch.save(content, file)
    text = (run / "journal.json").read_text()
    (run / "journal.json").write_text(
        text.replace(journal["checkpoint"]["checksum"], checksum(file))
    )
    check(bench, name, bench.fit(name, *LAST), whole)


def test_other_settings_are_refused_all_at_once(bench: Bench, stopped: Path) -> None:
    before = {p: p.read_bytes() for p in stopped.rglob("*") if p.is_file()}
    outcome = bench.fit(
        "half", *LAST, "--quantization.bits=3", "--data.calibration.seed=7",
        "--quantization.grid.zfold=false",
    )  # fmt: skip
    assert outcome.status == 2
    (line,) = outcome.text.splitlines()
    assert line.startswith(f"aespa-pl: {stopped} cannot be continued, because ")
    assert line.endswith("restore these, or start a new run without --ckpt_path")
    for change in (
        "calibration.seed was 0 and is 7",
        "quantization.bits was 2 and is 3",
        "quantization.grid.zfold was True and is False",
    ):
        assert change in line
    after = {p: p.read_bytes() for p in stopped.rglob("*") if p.is_file()}
    assert before == after


@pytest.mark.parametrize("what", ["model", "text"])
def test_other_model_or_text_is_refused(what: str, bench: Bench, stopped: Path) -> None:
    copy = Path(shutil.copytree(bench.folder / "model", bench.folder / f"other_{what}" / "model"))
    words = copy.parent / "words.txt"
    words.write_text((bench.folder / "words.txt").read_text())
    if what == "model":
        flip(copy / "model.safetensors")
    else:
        words.write_text(words.read_text().replace("w1", "w2"))
    options = (f"--model.pretrained={copy}", f"--data.calibration.source={words}")
    outcome = bench.fit("half", *LAST, *options)
    assert outcome.status == 2
    (line,) = outcome.text.splitlines()
    changed = re.findall(r"(\S+) was \w+\.\.\. and is \w+\.\.\.", line)
    assert changed == ["model" if what == "model" else "calibration.tokens"]


def test_iterations_may_change_for_the_blocks_to_come(bench: Bench, stopped: Path) -> None:
    name = "more_iterations"
    run = copied(stopped, bench, name)
    first = (run / "blocks/block_000.safetensors").read_bytes()
    outcome = bench.fit(name, *LAST, f"--quantization.rounding.iterations={2 * ITERATIONS}")
    assert outcome.status == 0, outcome.text
    assert (run / "blocks/block_000.safetensors").read_bytes() == first


def test_finished_run_is_left_alone(bench: Bench, whole: dict[str, bytes]) -> None:
    outcome = bench.fit("whole", *LAST)
    check(bench, "whole", outcome, whole)
    assert f"{bench.run_of('whole')} is finished already: nothing to do" in outcome.text


def test_last_of_no_run_is_a_new_one_and_of_several_the_newest(bench: Bench) -> None:
    outcome = bench.fit("numbers", *LAST, number=signal.SIGKILL, when="*/journal.json")
    assert "no run in" in outcome.text
    assert bench.fit("numbers", number=signal.SIGKILL, when="version_1/journal.json").status == -9
    (bench.runs / "numbers" / "version_7").mkdir()  # killed before its journal
    outcome = bench.fit("numbers", *LAST)
    newest = outcome.text.splitlines()[-1]
    assert version_number(Path(newest)) == 1
    assert bench.fit("numbers").text.splitlines()[-1].endswith("version_8")
