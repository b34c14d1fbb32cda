"""Before the first cell, settings that no cell can have are refused; those of one method are said."""

from pathlib import Path

import pytest

from aespa_pl.commands.cell_process import in_process
from aespa_pl.commands.compare import run
from aespa_pl.errors import EndedError, UserError
from aespa_pl.run.interruption import Interruption

WORDS = (
    "--model.pretrained=embedded:llama",
    "--data.calibration.segment_length=64",
    "--data.calibration.source=embedded",
    "--data.evaluation.texts=embedded",
    "--trainer.accelerator=cpu",
)


def compared(*more: str) -> None:
    run(["compare", *WORDS, *more], Interruption())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--quantization.group_size=7"], r"group_size is 7, but the projections have columns"),
        (
            ["--data.evaluation.segment_length=4096"],
            r"evaluation\.segment_length is 4096, but embedded:llama",
        ),
        (["--trainer.accelerator=abacus"], r"trainer: .*accelerator"),
        (["--compare.formats=[Q4_0, Q2_K]", "--compare.methods=[omniquant]"], r"format is Q4_0, whose types"),
        (
            [
                "--compare.methods=[aespa-tuned]",
                "--trainer.callbacks=EarlyStopping",
                "--trainer.callbacks.monitor=x",
            ],
            r"trainer\.callbacks has EarlyStopping",
        ),
    ],
)
def test_settings_that_no_cell_can_have_leave_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        compared(*words)
    assert list(tmp_path.iterdir()) == []


def test_settings_that_one_method_cannot_have_are_said_before_the_first_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("aespa_pl.commands.compare.in_process", lambda _, words: f"not run: {len(words)}")
    with pytest.raises(EndedError, match=r"^2 of 2 cells have failed"):
        compared("--compare.formats=[Q4_0]", "--compare.methods=[omniquant, rtn]")
    said = capsys.readouterr().out.split("cell 1 of 2")[0].splitlines()
    assert len(said) == 1
    assert said[0].startswith("This will fail: omniquant, Q4_0: quantization.format is Q4_0, whose types")


def test_too_few_segments_for_one_method_are_said_before_the_first_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("aespa_pl.commands.compare.in_process", lambda *_: "not run")
    with pytest.raises(EndedError):
        compared(
            "--compare.methods=[rtn, aespa-tuned]", "--compare.bits=[3]", "--data.calibration.segments=1"
        )
    assert capsys.readouterr().out.startswith("This will fail: aespa-tuned, 3 bits: tuning: the cal")


def test_the_reason_of_a_failed_cell_is_said_once_behind_its_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho a warning >&2; echo 'aespa-pl: no; continue with: x' >&2; exit 2\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    assert in_process(Interruption(), []) == "no"
    assert capsys.readouterr().err == "a warning\n"
