"""A run goes on only where its inputs allow it, and ``last`` is the last of a name."""

import re
import shutil
import signal
from pathlib import Path

import pytest

from aespa_pl.run.find import version_number
from aespa_pl.run.journal import Run
from aespa_pl.run.stored_settings import stored_settings
from tests.disks import flip
from tests.run.bench import EVERY, ITERATIONS, LAST, Bench, check, checkpoint_of, copied, results


def test_other_settings_are_refused_all_at_once(bench: Bench, stopped: Path) -> None:
    before = {p: p.read_bytes() for p in stopped.rglob("*") if p.is_file()}
    outcome = bench.fit(
        "half", *LAST, "--quantization.bits=3", "--data.calibration.seed=7",
        "--quantization.grid.zfold=false", "--quantization.tuning.held_back=0.2",
    )  # fmt: skip
    assert outcome.status == 2
    (line,) = outcome.text.splitlines()
    assert line.startswith(f"aespa-pl: {stopped} cannot be continued, because ")
    assert line.endswith("restore these, or start a new run without --ckpt_path")
    for change in (
        "calibration.seed was 0 and is 7",
        "quantization.bits was 2 and is 3",
        "quantization.grid.zfold was True and is False",
        "quantization.tuning.held_back was 0.0625 and is 0.2",
    ):
        assert change in line
    assert "_rate" not in line  # which follows from the bits
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


def test_what_was_learned_on_other_grids_is_learned_again(
    bench: Bench, stopped: Path, whole: dict[str, bytes]
) -> None:
    """A checkpoint is used: its values are changed, so that a run that goes on from them ends otherwise."""
    for grids, same in (("these", False), ("others", True)):
        run = copied(stopped, bench, f"{grids}_grids")
        with checkpoint_of(run) as content:
            for tensor in content["state_dict"].values():
                tensor.neg_()
        if same:
            text = (run / "journal.json").read_text()
            (run / "journal.json").write_text(re.sub(r"from \w+", "from 0", text))
        outcome = bench.fit(run.parent.name, *LAST)
        assert outcome.status == 0, outcome.text
        assert (results(run) == whole) == same


def test_iterations_may_change_for_the_blocks_to_come(bench: Bench, stopped: Path) -> None:
    name = "more_iterations"
    run = copied(stopped, bench, name)
    first = (run / "blocks/block_000.safetensors").read_bytes()
    outcome = bench.fit(name, *LAST, f"--quantization.rounding.iterations={2 * ITERATIONS}")
    assert outcome.status == 0, outcome.text
    assert (run / "blocks/block_000.safetensors").read_bytes() == first
    stored = stored_settings(run, Run.open(run).fingerprint)
    assert stored.quantization.rounding.iterations == 2 * ITERATIONS


def test_fewer_iterations_than_a_checkpoint_has_learn_its_block_again(bench: Bench, stopped: Path) -> None:
    name, few = "fewer_iterations", EVERY // 2
    copied(stopped, bench, name)
    outcome = bench.fit(name, *LAST, f"--quantization.rounding.iterations={few}")
    assert outcome.status == 0, outcome.text
    assert f"block 1: its checkpoint has more than {few} iterations, so it is learned again" in outcome.text


def test_finished_run_is_left_alone(bench: Bench, whole: dict[str, bytes]) -> None:
    outcome = bench.fit("whole", *LAST)
    check(bench, "whole", outcome, whole)
    assert f"{bench.run_of('whole')} is finished already: nothing to do" in outcome.text


def test_last_of_no_run_is_a_new_one_and_of_several_the_last_begun(bench: Bench) -> None:
    outcome = bench.fit("numbers", *LAST, number=signal.SIGKILL, when="*/journal.json")
    assert "no run in" in outcome.text
    assert bench.fit("numbers", number=signal.SIGKILL, when="version_1/journal.json").status == -9
    (bench.runs / "numbers" / "version_7").mkdir()  # killed before its journal
    outcome = bench.fit("numbers", *LAST)
    last = outcome.text.splitlines()[-1]
    assert version_number(Path(last)) == 1
    assert bench.fit("numbers").text.splitlines()[-1].endswith("version_8")
