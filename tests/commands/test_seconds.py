"""The seconds of a run are those of its blocks and of its end-to-end tuning, each phase once."""

import ast
from pathlib import Path

import aespa_pl
from aespa_pl.commands.fit import phase_seconds
from aespa_pl.run.journal import Run
from aespa_pl.run.schema import PHASES, TuningRecord
from tests.edited import edited

FOUND = TuningRecord(start_error=0.2, error=0.1, epoch=1, changed=0.0, finite=True)


def measured_phases() -> set[str]:
    """Return the phases that the walk and the steps of a block measure, from their source."""
    package = Path(aespa_pl.__file__).parent
    files = [file for folder in ("walk", "block") for file in (package / folder).glob("*.py")]
    return {
        name.value
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("measure", "_measure")
        and isinstance(name := node.args[0], ast.Constant)
        and isinstance(name.value, str)
    }


def test_every_phase_that_is_measured_is_counted() -> None:
    assert measured_phases() | {"tuning the model"} == set(PHASES)  # whose name is in a variable


def test_the_seconds_of_blocks_and_of_the_end_to_end_tuning_are_added_up(tmp_path: Path) -> None:
    run = Run.create(tmp_path, {})
    for index in range(2):
        run.finish_block(index, {"losses": {}, "seconds": {"grid": 2 + index, "writing": 0.5}}, [])
    run.tuned_file.touch()
    run.finish_tuning(FOUND, {"tuning the model": 7.0})
    found = phase_seconds(Run.open(run.folder))
    assert {phase: seconds for phase, seconds in found.items() if seconds} == {
        "grid": 5.0,
        "writing": 1.0,
        "tuning the model": 7.0,
    }
    assert tuple(found) == PHASES


def test_a_tuning_without_seconds_is_that_of_an_older_journal(tmp_path: Path) -> None:
    run = Run.create(tmp_path, {})
    run.tuned_file.touch()
    run.finish_tuning(FOUND, {"tuning the model": 7.0})
    with edited(run.journal_file) as journal:
        del journal["tuned"]["seconds"]
    assert not any(phase_seconds(Run.open(run.folder)).values())
