"""A bench has a small model, runs it in forks, and compares what the runs leave."""

import json
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aespa_pl.storage.files import checksum
from tests.edited import edited
from tests.forks import Forks, Outcome
from tests.models.examples import LENGTH
from tests.walks import SEGMENTS

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

    def options(self, name: str) -> dict[str, Any]:
        """Return the options of a run of this name."""
        return {
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

    def arguments(self, name: str, *more: str) -> list[str]:
        return ["fit", *(f"--{key}={value}" for key, value in self.options(name).items()), *more]

    def fit(self, name: str, *more: str, number: int = 0, when: str = "", delay: float = 0.0) -> Outcome:
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


def kill_at_each(bench: Bench, name: str, moments: Sequence[str], *options: str) -> None:
    """Kill a run when the first of some files has just appeared, go on until the next one does, and so on."""
    kills = 0
    for when in moments:
        outcome = bench.fit(name, *LAST, *options, number=signal.SIGKILL, when=f"*/{when}")
        # a file that was renamed or gone before it was seen: then the run goes on to its end
        assert outcome.status in (-signal.SIGKILL, 0), f"{when}: {outcome.text}"
        kills += outcome.status == -signal.SIGKILL
        if outcome.status == 0:
            break
    assert kills > len(moments) / 2


def copied(stopped: Path, bench: Bench, name: str) -> Path:
    """Return the interrupted run under another name."""
    return Path(shutil.copytree(stopped, bench.runs / name / "version_0"))


@contextmanager
def checkpoint_of(run: Path) -> Iterator[dict[str, Any]]:
    """Give the content of an interrupted run's checkpoint, which the run holds as it was changed."""
    with edited(run / "journal.json") as journal:
        file = run / journal["checkpoint"]["file"]
        content = torch.load(file, weights_only=True)
        yield content
        torch.save(content, file)
        journal["checkpoint"]["checksum"] = checksum(file)


def remove(path: Path) -> None:
    path.unlink()
