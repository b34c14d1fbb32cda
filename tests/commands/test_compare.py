"""The table of methods: cells that ran, cells that failed, and cells that are not run again."""

import csv
import io
import math
import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from aespa_pl.cli import main
from aespa_pl.commands.arguments import Arguments, Option
from aespa_pl.commands.cell_process import failure
from aespa_pl.commands.compare import compare
from aespa_pl.errors import EndedError, UserError
from aespa_pl.report.comparison import Cell, figure, summary
from aespa_pl.run.journal import Run
from aespa_pl.settings import CompareSettings
from aespa_pl.storage.files import write_json

SETTINGS = CompareSettings(methods=["rtn", "optq"], bits=[2], seeds=[0, 1])


def metrics(quantized: float, seconds: float = 4.0) -> dict[str, Any]:
    return {
        "perplexity": {
            "original": {"text": 10.0},
            "nearest": {"text": 40.0},
            "quantized": {"text": quantized},
        },
        "seconds": {"total": 9.0, "quantization": seconds, "grid": 1.0, "rounding": 0.0},
        "peak_bytes": {"host": 2 * 10**9},
    }


def given(folder: Path, *more: str) -> Arguments:
    return Arguments.read(["--model.pretrained=m", f"--output.folder={folder}", *more])


def value(words: Sequence[str], key: str) -> str:
    return [word.partition("=")[2] for word in words if word.startswith(f"--{key}=")][-1]


class Runs:
    """Stands for the processes of cells: it leaves runs that are finished, or fails."""

    def __init__(self, perplexities: dict[str, float]) -> None:
        self.perplexities = perplexities
        self.names: list[str] = []

    def __call__(self, words: Sequence[str]) -> str:
        name = value(words, "output.name")
        self.names.append(name)
        assert value(words, "ckpt_path") == "last"
        assert name == "_".join(
            [
                value(words, "quantization.method"),
                f"w{value(words, 'quantization.bits')}",
                f"s{value(words, 'data.calibration.seed')}",
            ]
        )
        if name not in self.perplexities:
            return "out of memory"
        made = Run.create(Path(value(words, "output.folder")) / name, {})
        write_json(made.metrics_file, metrics(self.perplexities[name]))
        return ""


def silent() -> Console:
    return Console(file=io.StringIO(), width=40)


@pytest.mark.parametrize(
    ("peaks", "found"), [({"host": 9, "device": 4}, 4), ({"host": 9, "device": 0}, 9), ({"host": 9}, 9)]
)
def test_memory_is_the_devices_where_it_has_its_own(peaks: dict[str, int], found: int) -> None:
    assert Cell("rtn", 2, 0, {"peak_bytes": peaks}).peak_bytes == found
    assert Cell("rtn", 2, 0).peak_bytes is None


def test_all_methods_are_compared_unless_some_are_named() -> None:
    names = {
        "rtn", "optq", "zfold", "awq", "boa", "adaround", "brecq", "omniquant", "affinequant",
        "aespa", "aespa-fast", "aespa-hybrid", "aespa-tuned",
    }  # fmt: skip
    assert sorted(CompareSettings().methods) == sorted(names)
    assert CompareSettings().methods[0] == "rtn"  # the figure and the tables begin with it


def never(words: Sequence[str]) -> str:
    raise AssertionError(f"run again: {words}")


def test_cells_become_one_row_for_each_method_with_mean_and_spread(tmp_path: Path) -> None:
    runs = Runs({"rtn_w2_s0": 40.0, "rtn_w2_s1": 40.0, "optq_w2_s0": 20.0, "optq_w2_s1": 22.0})
    folder = compare(SETTINGS, given(tmp_path), runs, silent())
    lines = (folder / "compare.md").read_text().splitlines()
    assert [c.strip() for c in lines[2].split("|")[1:5]] == ["original", "-", "10.000", "-"]
    assert [c.strip() for c in lines[3].split("|")[1:5]] == ["nearest", "2", "40.000", "-"]
    assert [c.strip() for c in lines[4].split("|")[1:5]] == ["rtn", "2", "40.000 ± 0.000", "1.000"]
    relative = (math.log(2) + math.log(2.2)) / 2 / math.log(4)
    assert [c.strip() for c in lines[5].split("|")[1:5]] == [
        "optq", "2", "21.000 ± 1.414", f"{relative:.3f}",
    ]  # fmt: skip
    rows = list(csv.DictReader((folder / "compare.csv").read_text().splitlines()))
    assert [row["perplexity text"] for row in rows] == ["40.0", "40.0", "20.0", "22.0"]
    assert {(row["original text"], row["nearest text"]) for row in rows} == {("10.0", "40.0")}
    assert {row["peak bytes"] for row in rows} == {"2000000000"}
    assert "seconds rounding" not in rows[0]
    assert (folder / "compare.svg").read_text().startswith("<?xml")


def test_formats_take_the_place_of_bits(tmp_path: Path) -> None:
    chosen: list[tuple[str, str]] = []

    def run(words: Sequence[str]) -> str:
        chosen.append((value(words, "output.name"), value(words, "quantization.format")))
        assert not [word for word in words if word.startswith("--quantization.bits")]
        assert (value(words, "quantization.target") == "null") == (chosen[-1][1] != "auto")
        return "out of memory"

    shared = given(tmp_path).then(Option("quantization.target", "3 MB"))
    with pytest.raises(EndedError):
        compare(replace(SETTINGS, formats=["Q2_K", "auto"], seeds=[0]), shared, run, silent())
    assert chosen == [(f"{m}_{f}_s0", f) for f in ("Q2_K", "auto") for m in ("rtn", "optq")]
    rows = list(csv.DictReader((tmp_path / "compare" / "compare.csv").read_text().splitlines()))
    assert [row["bits"] for row in rows] == ["Q2_K", "Q2_K", "auto", "auto"]


def test_finished_cells_are_not_run_again_and_others_are(tmp_path: Path) -> None:
    runs = Runs({"rtn_w2_s0": 40.0, "rtn_w2_s1": 40.0, "optq_w2_s0": 20.0})
    with pytest.raises(EndedError, match=r"^1 of 4 cells have failed \(optq_w2_s1\)") as ended:
        compare(SETTINGS, given(tmp_path), runs, silent())
    assert ended.value.status == 1
    again = Runs({"optq_w2_s1": 22.0})
    compare(SETTINGS, given(tmp_path), again, silent())
    assert again.names == ["optq_w2_s1"]
    compare(SETTINGS, given(tmp_path), never, silent())


def test_a_configuration_with_numbers_as_keys_is_the_same_again(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("quantization: {bits_of: {0: 4}}")
    runs = Runs({f"{m}_w2_s{s}": 20.0 for m in ("rtn", "optq") for s in (0, 1)})
    for run_cell in (runs, never):
        compare(SETTINGS, given(tmp_path, f"--config={file}"), run_cell, silent())


def test_finished_cells_stay_in_the_table_of_a_comparison_that_is_killed_early(tmp_path: Path) -> None:
    optq = replace(SETTINGS, methods=["optq"], seeds=[0])
    compare(optq, given(tmp_path), Runs({"optq_w2_s0": 20.0}), silent())

    def killed(words: Sequence[str]) -> str:
        if value(words, "output.name") == "rtn_w2_s1":
            raise KeyboardInterrupt
        return "out of memory"

    with pytest.raises(KeyboardInterrupt):
        compare(SETTINGS, given(tmp_path), killed, silent())
    rows = list(csv.DictReader((tmp_path / "compare" / "compare.csv").read_text().splitlines()))
    assert "20.0" in [row["perplexity text"] for row in rows]


def test_a_cell_that_fails_says_so_and_the_rest_goes_on(tmp_path: Path) -> None:
    runs = Runs({"rtn_w2_s0": 40.0, "optq_w2_s1": 20.0})
    with pytest.raises(EndedError, match=r"^2 of 4 cells have failed"):
        compare(SETTINGS, given(tmp_path), runs, silent())
    table = (tmp_path / "compare" / "compare.md").read_text()
    assert "| 1 of 2 | seed 1: out of memory |" in table
    assert "| 1 of 2 | seed 0: out of memory |" in table
    assert "| optq | 2 | 20.000 |" in table


def test_a_comparison_of_something_else_is_refused(tmp_path: Path) -> None:
    everything = Runs({f"{m}_w2_s{s}": 20.0 for m in ("rtn", "optq") for s in (0, 1)})
    compare(SETTINGS, given(tmp_path), everything, silent())
    other = given(tmp_path, "--quantization.group_size=32")
    with pytest.raises(UserError, match=r"\(quantization\.group_size was None and is 32\): give"):
        compare(SETTINGS, other, never, silent())


def test_formats_go_before_that_of_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [f"--output.folder={tmp_path}", "--model.pretrained=/no/where"]
    with pytest.raises(SystemExit):
        main(["compare", "--config=gguf_q2_k.yaml", "--compare.formats=[Q4_0]", *options])
    assert "there is no folder /no/where" in capsys.readouterr().err


def test_two_comparisons_in_one_folder_exclude_each_other(tmp_path: Path) -> None:
    def run_cell(_words: Sequence[str]) -> str:
        with pytest.raises(UserError, match=r"compare is in use by .* another --output\.name"):
            compare(SETTINGS, given(tmp_path), never, silent())
        return "out of memory"

    with pytest.raises(EndedError):
        compare(SETTINGS, given(tmp_path), run_cell, silent())


@pytest.mark.parametrize("content", ["[]", "{", "3"])
def test_a_damaged_note_of_what_the_cells_share_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "compare").mkdir()
    (tmp_path / "compare" / "compare.json").write_text(content)
    with pytest.raises(UserError, match=r"compare\.json (is damaged|cannot be read).*: remove it"):
        compare(SETTINGS, given(tmp_path), never, silent())


def test_a_damaged_journal_fails_its_cell_alone(tmp_path: Path) -> None:
    damaged = tmp_path / "compare" / "rtn_w2_s0" / "version_0"
    damaged.mkdir(parents=True)
    (damaged / "journal.json").write_text("[")
    finished = dict.fromkeys(("rtn_w2_s1", "optq_w2_s0", "optq_w2_s1"), 20.0)
    with pytest.raises(EndedError, match=r"^1 of 4 cells have failed \(rtn_w2_s0\)"):
        compare(SETTINGS, given(tmp_path), Runs(finished), silent())


@pytest.mark.parametrize(
    ("status", "said", "expected"),
    [
        (0, "a warning", ""),
        (2, "warning\naespa-pl: no space; continue with: aespa-pl fit\n", "no space"),
        (-signal.SIGKILL, "", "ended by signal 9 (most likely out of memory)"),
        (-signal.SIGSEGV, "", "ended by signal 11"),
        (1, "Traceback\n  line\nValueError: x\n", "ValueError: x"),
    ],
)
def test_failure_is_the_last_line_of_the_run(status: int, said: str, expected: str) -> None:
    assert failure(status, said) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--quantization.bits=3"], r"bits differs from cell to cell: use --compare.bits"),
        (
            ["--compare.methods=[rtn, aesop]"],
            r"compare\.methods is \[rtn, aesop\]: expected a list, each item one of rtn, .*, aespa-tuned$",
        ),
        (["--compare.bits=[1, 3, 9]"], r"bits is \[1, 3, 9\]: expected a list, each item a whole .* 2 to 8$"),
        (["--compare.bits+=1"], r"compare\.bits is 1: expected a list, each item a whole .* 2 to 8$"),
        (["--compare.bits"], r"compare\.bits has no value"),
        (
            ["--compare.bits=[x]", "--compare.seeds=[-1, 0]"],
            r"compare\.bits is \[x\]: .* 2 to 8; compare\.seeds is \[-1, 0\]: .* 0 to 4294967295$",
        ),
        (["--compare.bit=[3]"], r"compare\.bit is unknown: did you mean compare\.bits\?"),
        (["--compare.seeds=[]"], "seeds is empty"),
        (
            ["--trainer.fast_dev_run=true"],
            r"fast_dev_run: a smoke test measures nothing: try it with aespa-pl fit",
        ),
        (["--quantization.format=Q2_K"], r"format differs from cell to cell: use --compare\.formats"),
        (["--config=gguf_q2_k.yaml"], r"Q2_K, which goes before the bits .* --compare\.formats '\[Q2_K\]'"),
        (["--quantization.target=2.75"], r"target is 2\.75, which needs auto among --compare\.formats"),
        (["--compare.formats=[Q4_0]", "--quantization.target=2 GB"], "target is 2 GB, which needs auto"),
        (["--compare.formats=[Q4_0, auto]"], "format is auto, .*: set quantization.target"),
        (["--compare.formats=[Q4_0]", "--compare.bits=[2]"], "of all cells are, .*: leave one out"),
        (["--compare.formats=[Q4_0, Q9_K]"], "format is Q9_K: expected one of uniform, auto, Q2_K_S"),
    ],
)
def test_mistakes_are_refused_before_any_cell(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["compare", "--model.pretrained=nowhere", *words])
    assert ended.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_row_without_any_result_has_no_numbers() -> None:
    table = summary([Cell("rtn", 2, 0, failure="out of memory")])
    assert table.rows == [["rtn", "2", "-", "-", "0 of 1", "seed 0: out of memory"]]
    assert figure([Cell("rtn", 2, 0, failure="out of memory")]) is None


def test_figure_has_a_panel_for_each_bit_width_and_a_point_for_each_method() -> None:
    cells = [
        Cell(m, b, 0, metrics(20.0 + b) | {"size": {"quantized": {"bytes": b * 10**6}}})
        for m in ("rtn", "optq")
        for b in (2, 3)
    ]
    drawn = figure(cells)
    assert drawn is not None
    of_size, *of_bits = drawn.axes
    sizes = {tuple(np.ravel(line.get_xydata())) for line in of_size.get_lines()}
    assert {(2.0, 22.0), (3.0, 23.0)} <= sizes
    assert [panel.get_title() for panel in of_bits] == ["2 bits", "3 bits"]
    for panel, bits in zip(of_bits, (2, 3), strict=True):
        points = [tuple(np.ravel(line.get_xydata())) for line in panel.get_lines()]
        assert (4.0, 20.0 + bits) in points
