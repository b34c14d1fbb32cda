"""The cells of a comparison are processes: they get signals, and read no file of the current folder."""

import io
import os
import re
import shlex
import signal
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from aespa_pl.cli import message_and_status
from aespa_pl.commands.arguments import Arguments
from aespa_pl.commands.cell_process import failure, in_process
from aespa_pl.commands.compare import compare, run
from aespa_pl.distributed.launch import LAUNCHER
from aespa_pl.errors import EndedError
from aespa_pl.progress import WalkProgress
from aespa_pl.run.interruption import Interruption, RunInterrupted
from aespa_pl.run.journal import Run
from aespa_pl.settings import CompareSettings
from tests.models.examples import make_model
from tests.walks import save_with_words


def test_a_file_of_the_current_folder_is_no_library_of_a_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "yaml.py").write_text("raise SystemExit('the file of the current folder ran')")
    monkeypatch.chdir(tmp_path)
    said = in_process(Interruption(), ["--nowhere=1"])  # refused before torch is imported
    assert "the file of the current folder ran" not in said
    assert "nowhere is unknown" in said


def test_the_reason_of_a_crash_is_its_error_not_how_to_continue() -> None:
    said = "Traceback ...\nRuntimeError: a bug\nnothing is lost; continue with: aespa-pl fit --ckpt_path x\n"
    assert failure(1, said) == "RuntimeError: a bug"


def test_a_comparison_that_is_stopped_says_once_how_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho 'aespa-pl: stopped; continue with: aespa-pl fit' >&2; exit 143\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    interruption = Interruption()
    interruption.received = signal.SIGTERM
    words = ["compare", "--model.pretrained=m", f"--output.folder={tmp_path}"]
    with pytest.raises(RunInterrupted) as stopped:
        run(words, interruption)
    said = message_and_status(stopped.value, interruption.how_to_continue)
    assert said == (f"stopped by SIGTERM; continue with: aespa-pl {shlex.join(words)}", 143)
    assert capfd.readouterr().err == ""


def test_processes_leave_runs_like_any_other(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = save_with_words(make_model("opt"), tmp_path / "model")
    words = str(tmp_path / "words.txt")
    shared = Arguments.read(
        [
            f"--model.pretrained={model}", f"--output.folder={tmp_path / 'runs'}",
            f"--data.calibration.source={words}", f"--data.evaluation.texts={words}",
            "--data.calibration.segments=4", "--data.calibration.segment_length=16",
            f"--data.cache={tmp_path / 'cache'}", "--trainer.accelerator=cpu",
        ]
    )  # fmt: skip
    settings = CompareSettings(methods=["rtn"], bits=[3], seeds=[0])
    console = Console(file=io.StringIO(), record=True, width=200)
    folder = compare(settings, shared, partial(in_process, Interruption()), console)
    heading, result, *_ = console.export_text().splitlines()
    assert heading == "cell 1 of 1: rtn_w3_s0"
    assert re.fullmatch(r"rtn, 3 bits: perplexity words\.txt \d+\.\d{3}, \d+ s", result)
    assert capfd.readouterr().out == ""  # the cell has no warnings, and its results are in this line
    finished = Run.open(folder / "rtn_w3_s0" / "version_0").metrics()
    assert finished is not None
    assert finished["perplexity"]["quantized"] == pytest.approx(finished["perplexity"]["nearest"], rel=1e-2)
    with pytest.raises(EndedError):  # the program of this cell fails
        compare(
            CompareSettings(methods=["optq"], bits=[3], seeds=[0]), shared, lambda _: "it failed", console
        )
    assert "and so not in the table: rtn_w3_s0\n" in console.export_text()


def test_a_cell_says_its_warnings_alone() -> None:
    console = Console(file=io.StringIO(), record=True)
    progress = WalkProgress(console, terse=True)
    progress.say("run folder: x")
    progress.warn("x is a calibration text as well")
    assert console.export_text() == "x is a calibration text as well\n"


def test_a_signal_is_passed_on_and_ends_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    interruption = Interruption()
    monkeypatch.setattr("sys.executable", "/bin/sleep")  # sleep -m ... ends at once: a run that fails
    interruption.received = signal.SIGTERM
    with pytest.raises(RunInterrupted):
        in_process(interruption, ["60"])


class Impatient(subprocess.Popen[bytes]):
    """A process whose user sends two signals before the first one is passed on."""

    started: "Impatient"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        Impatient.started = self

    def wait(self, timeout: float | None = None) -> int:
        if timeout is None:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
        return super().wait(timeout)


def test_two_signals_at_once_do_not_leave_a_run_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    monkeypatch.setattr("subprocess.Popen", Impatient)
    interruption = Interruption()
    with pytest.raises(RunInterrupted), interruption.watching():
        in_process(interruption, [])
    try:
        assert Impatient.started.wait(10) == -signal.SIGTERM
    finally:
        Impatient.started.kill()


def test_a_cell_ends_with_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell looks whether the process that started it is there; a killed one can't end its cells."""
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho ${LAUNCHER} >&2; exit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    assert in_process(Interruption(), []) == str(os.getpid())
