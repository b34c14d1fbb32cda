"""The command ``aespa-pl`` runs in this process, with arguments of a run that takes a second."""

import io
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from aespa_pl import cli

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
LENGTH = 32


class CommandLine:
    """Runs ``aespa-pl`` in this process, in the current folder."""

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        """Return status, stdout and stderr."""
        out, err = io.StringIO(), io.StringIO()
        status: Any = 0
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setattr(sys, "argv", ["aespa-pl", *(str(word) for word in arguments)])
            try:
                cli.main()
            except SystemExit as end:
                status = end.code or 0
        return status, out.getvalue(), err.getvalue()


@dataclass(frozen=True)
class Done:
    """Holds what a run left that several tests look at, and what it printed."""

    run: Path
    out: str

    def copied(self, name: str = "aespa") -> Path:
        """Copy the run into the current folder, as if it had been made there."""
        return Path(shutil.copytree(self.run, Path("lightning_logs", name, "version_0")))


def done(folder: Path, *arguments: object) -> Done:
    """Run ``fit`` in a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("COLUMNS", "200")
        status, out, err = CommandLine()("fit", *arguments)
    assert (status, err) == (0, "")
    return Done(folder / out.splitlines()[-1], out)


NO_TEXTS = ("--data.evaluation.texts", "null")
LAST = ("--ckpt_path", "last")


def small(model: Path) -> list[object]:
    """Return the arguments of a run that takes a second; the runs of a module share a cache."""
    return [
        "--model.pretrained", model, "--data.calibration.source", "embedded",
        "--data.calibration.segments", 4, "--data.calibration.segment_length", LENGTH,
        "--data.evaluation.texts", "[embedded]", "--data.evaluation.max_segments", 3,
        "--data.cache", model.parent / "cache", "--quantization.method", "aespa",
        "--quantization.rounding.iterations", 10,
        "--output.checkpoint_seconds", "null",
        "--trainer.accelerator", "cpu", "--trainer.log_every_n_steps", 5,
    ]  # fmt: skip
