"""The sentences of the page say what the numbers say, and what is missing is named with its reason."""

import io
import json
import math
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from aespa_pl.commands.report import report
from aespa_pl.errors import UserError
from aespa_pl.evaluation.table import result_table
from aespa_pl.report.comparison import Cell, figure
from aespa_pl.report.stored import read_run
from tests.edited import edited
from tests.report.pages import EVERY_FIGURE, write_page
from tests.report.simulated import simulate

if find_spec("matplotlib") is None or find_spec("jinja2") is None:
    pytest.skip("matplotlib is not installed: pip install '.[report]'", allow_module_level=True)

from aespa_pl.report import maps, page


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the figures of a page empty, as it takes seconds to draw them: words are looked at."""
    monkeypatch.setattr("aespa_pl.report.page.for_page", lambda *_: '<svg viewBox="0 0 1 1"></svg>')


@pytest.mark.usefixtures("undrawn")
def test_a_run_without_a_finished_block_still_gives_a_page(tmp_path: Path) -> None:
    folder = simulate(tmp_path / "run/version_0", 0, finished=False)
    text = write_page(tmp_path / "page", folder).read_text()
    assert "No block is finished yet" in text
    assert "Blocks that are finished: 0" in text


@pytest.mark.usefixtures("undrawn")
def test_settings_that_differ_come_first(tmp_path: Path) -> None:
    folders = [simulate(tmp_path / f"run_{bits}/version_0", 1, bits=bits) for bits in (2, 4)]
    table = page.differences([read_run(folder) for folder in folders])
    assert table.rows == [["quantization.bits", "2", "4"]]
    text = write_page(tmp_path / "page", *folders).read_text()
    assert text.index('id="differences"') < text.index('id="results"')


@pytest.mark.parametrize(
    ("quantized", "words", "rest"),
    # ln(1.09) / ln(100) = 0.0187: 98 % of the loss in nats is avoided
    [
        (9.0, "has a lower perplexity than the original", "9.00 (-10 %)"),
        (9.91, "is as good as the original to within 1 %", "9.91 (-1 %)"),
        (10.09, "is as good as the original to within 1 %", "10.09 (+1 %)"),
        (10.4, "is slightly worse than the original", "10.40 (+4 %)"),
        (10.9, "is clearly worse than the original", "10.90 (+9 %)"),
        (14.0, "is much worse than the original", "14.00 (+40 %)"),
        (30.0, "is far worse than the original", "30.00 (+200 %)"),
    ],
)
def test_the_verdict_is_the_arithmetic_of_the_perplexities(
    tmp_path: Path, quantized: float, words: str, rest: str
) -> None:
    folder = simulate(tmp_path / "run/version_0", 1)
    perplexity = {"original": {"t": 10.0}, "quantized": {"t": quantized}}
    (folder / "metrics.json").write_text(json.dumps({"perplexity": perplexity}))
    said = f"The quantized model {words}: on t the perplexity goes from 10.00 to {rest}"
    assert page.verdict(read_run(folder)) == f"{said}."
    perplexity["nearest"] = {"t": 1000.0}
    (folder / "metrics.json").write_text(json.dumps({"perplexity": perplexity}))
    avoided = round(100 * (1 - math.log(quantized / 10) / math.log(100)))
    assert page.verdict(read_run(folder)) == (
        f"{said}; round-to-nearest would give 1000.00, so {avoided} % of its loss (in nats) is avoided."
    )


def test_a_run_that_is_not_finished_is_not_measured_yet(tmp_path: Path) -> None:
    run = read_run(simulate(tmp_path / "run/version_0", 1, finished=False))
    assert page.verdict(run) == "Not measured yet: the run is not finished."


def test_a_result_worse_than_nearest_rounding_is_said_in_words(tmp_path: Path) -> None:
    folder = simulate(tmp_path / "run/version_0", 1)
    perplexity = {"original": {"t": 10.0}, "nearest": {"t": 100.0}, "quantized": {"t": 1000.0}}
    (folder / "metrics.json").write_text(json.dumps({"perplexity": perplexity}))
    assert page.verdict(read_run(folder)).endswith(
        "would give 100.00, so the loss (in nats) is 100 % larger than by rounding to nearest."
    )


def test_later_measurements_are_shown_beside_the_runs_own(tmp_path: Path) -> None:
    folder = simulate(tmp_path / "run/version_0", 1, extras=False)
    kinds = {"original": {"wikitext2": 9.0, "mine": 10.0}, "quantized": {"wikitext2": 9.5, "mine": 11.0}}
    later = {"perplexity": kinds, "tokens": {"wikitext2": "(4, 512) 1", "mine": "(4, 512) 2"}}
    (folder / "test.json").write_text(json.dumps(later))
    table = page.result_table([read_run(folder)])
    wikitext2, mine = map(table.head.index, ("perplexity, wikitext2", "perplexity, mine"))
    assert [(row[0], row[wikitext2], row[mine]) for row in table.rows] == [
        ("original", "20.000", "10.000"),
        ("round-to-nearest", "300.000", "-"),
        ("quantized", "27.000", "11.000"),
    ]


def test_the_page_has_the_table_of_the_terminal_with_the_names_of_the_runs(tmp_path: Path) -> None:
    metrics = {
        "perplexity": {"original": {"t": 10.0}, "nearest": {"t": 30.0}, "quantized": {"t": 11.0}},
        "tasks": {"quantized": {"piqa": {"value": 0.5, "error": 0.01}}},
        "test_seconds": {"quantized": 7.0},
    }
    folders = [simulate(tmp_path / f"run_{n}/version_0", 1, extras=False) for n in (0, 1)]
    (folders[0] / "metrics.json").write_text(json.dumps(metrics))
    (folders[1] / "metrics.json").write_text(json.dumps({"perplexity": {"quantized": {"u": 9.0}}}))
    table = page.result_table([read_run(folder) for folder in folders])
    assert table.head == ["", "perplexity, t", "perplexity, u", "piqa, %", "seconds"]
    assert table.rows == [
        ["run_0/version_0, original", "10.000", "-", "-", "-"],
        ["run_0/version_0, round-to-nearest", "30.000", "-", "-", "-"],
        ["run_0/version_0, quantized", "11.000", "-", "50.0 ± 1.0", "7"],
        ["run_1/version_0, quantized", "-", "9.000", "-", "-"],
    ]
    table = page.result_table([read_run(folders[0])])
    assert table == result_table(metrics)


def test_a_text_measured_on_different_tokens_has_a_column_for_each(tmp_path: Path) -> None:
    """Perplexities of one column are comparable; runs of older versions do not say what theirs is of."""
    tokens, runs = ("(4, 64) 1", "(16, 64) 2", "(4, 64) 3", None, "(4, 64) 1"), []
    for number, of_t in enumerate(tokens):
        folder = simulate(tmp_path / f"run_{number}/version_0", 1, extras=False)
        metrics = {
            "perplexity": {"quantized": {"t": 10.0, "u": 5.0}},
            "tokens": {"t": of_t, "u": "(4, 64) 9"},
        }
        if of_t is None:
            metrics = {"perplexity": {"quantized": {"t": 10.0}}}
        (folder / "metrics.json").write_text(json.dumps(metrics))
        runs.append(read_run(folder))
    table = page.result_table(runs)
    assert table.head == [
        "", "perplexity, t (4 segments of 64 tokens, set 1)", "perplexity, u",
        "perplexity, t (16 segments of 64 tokens)", "perplexity, t (4 segments of 64 tokens, set 3)",
        "perplexity, t (of an older version)",
    ]  # fmt: skip
    columns = [row.index("10.000") for row in table.rows]
    assert columns == [1, 3, 4, 5, 1]
    assert page.result_table(runs[:1]).head == ["", "perplexity, t", "perplexity, u"]


def test_the_worst_projection_is_named(tmp_path: Path) -> None:
    folder = simulate(tmp_path / "run/version_0", 3)
    with edited(folder / "journal.json") as journal:
        journal["blocks"]["1"]["losses"]["v_proj"] |= {"nearest": 2.0, "final": 3.0}
    run = read_run(folder)
    picture = maps.final_loss_map(run, 10, (0, 2))
    assert "Least is gained in v_proj of block 1 (1.50)" in picture.caption
    assert "1 are worse than nearest rounding" in picture.caption
    assert "v_proj of block 1 (1.50)" in page.where_lost(run)


def test_what_trainings_gained_is_said(tmp_path: Path) -> None:
    folder = simulate(tmp_path / "run/version_0", 3)
    with edited(folder / "journal.json") as journal:
        for block, error in (("0", 0.5), ("1", 0.75), ("2", 1.0)):
            found = {"start_error": 1.0, "error": error, "epoch": 2, "changed": 0.1, "finite": True}
            journal["blocks"][block]["tuning"] = found
        of_model = {"start_error": 0.04, "error": 0.03, "epoch": 1, "changed": 0.0, "finite": True}
        journal["tuned"] = {**of_model, "file": "tuned.safetensors", "checksum": "0"}
    run = read_run(folder)
    assert "to 50% to 100% of what it was, 75% in the median block" in page.tunings(run)
    assert "the divergence there from 0.04 to 0.03" in page.tunings(run)
    assert page.where_lost(run).startswith("Before the trainings, most of nearest")


def test_costs_are_the_journal_s(tmp_path: Path) -> None:
    folder = simulate(tmp_path / "run/version_0", 2)
    with edited(folder / "journal.json") as journal:
        for number, record in journal["blocks"].items():
            record["seconds"] = {"grid": 30.0, "polish": 10.0 * (1 + int(number))}
        journal["tuned"] = {
            "start_error": 0.2, "error": 0.1, "epoch": 1, "changed": 0.0, "finite": True, "file": "tuned",
            "checksum": "", "seconds": {"tuning the model": 30.0},
        }  # fmt: skip
    run = read_run(folder)
    costs = page.costs_of(run)
    assert costs["grid"] == "60.0 s (50 %)"
    assert costs["polish"] == "30.0 s (25 %)"
    assert costs["tuning the model"] == "30.0 s (25 %)"
    assert costs["all phases"] == "2.0 min"
    assert costs["host memory, peak"] == "2.1 GB"
    assert costs["blocks finished"] == "2"


def test_costs_of_runs_have_their_sum_after_all_phases_and_no_phase_without_work(tmp_path: Path) -> None:
    seconds = ({"grid": 3.0, "rounding": 1e-5}, {"grid": 3.0, "rounding": 2e-5, "tuning": 9.0, "polish": 4.0})
    folders = [simulate(tmp_path / f"run_{n}/version_0", 1, extras=False) for n in (0, 1)]
    for folder, of_block in zip(folders, seconds, strict=True):
        with edited(folder / "journal.json") as journal:
            journal["blocks"]["0"]["seconds"] = of_block
    rows = {row[0]: row[1:] for row in page.costs_table([*map(read_run, folders)]).rows}
    shown = list(rows)
    assert shown[shown.index("grid") : shown.index("all phases") + 1] == [
        "grid",
        "polish",
        "tuning",
        "all phases",
    ]
    assert rows["tuning"] == ["-", "9.0 s (56 %)"]


def test_names_with_dollars_and_html_are_shown_as_they_are(tmp_path: Path) -> None:
    """A dollar sign begins a formula for matplotlib, and < a tag for a browser."""
    hostile = "a$\\frac{$<img src=x onerror=alert(1)>"
    folder = simulate(tmp_path / "run$_<b>$/version_0", 2)
    with edited(folder / "journal.json") as journal:
        for record in journal["blocks"].values():
            record["losses"][hostile] = record["losses"]["q_proj"]
    perplexity = {"original": {hostile: 10.0}, "quantized": {hostile: 11.0}}
    (folder / "metrics.json").write_text(json.dumps({"perplexity": perplexity}))
    text = write_page(tmp_path / "page", folder).read_text()
    assert "<img" not in text
    assert "<b>$" not in text
    assert text.count("a$\\frac{$&lt;img") >= 3  # table, verdict, map


@pytest.mark.usefixtures("undrawn")  # on the page; the files are drawn
def test_figures_are_written_beside_the_page(tmp_path: Path) -> None:
    folder = simulate(tmp_path / "run/version_0", 2)
    report([str(folder)], figures="png")
    files = sorted(path.name for path in (folder / "report" / "figures").iterdir())
    assert files == sorted(f"{name}.png" for name in EVERY_FIGURE)
    assert (folder / "report" / "report.html").is_file()
    assert (folder / "report" / "figures" / "final-loss.png").read_bytes()[:4] == b"\x89PNG"


def test_without_a_plotting_library_the_user_reads_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = simulate(tmp_path / "run/version_0", 1)
    for name in [name for name in sys.modules if name.startswith(("matplotlib", "aespa_pl.report.p"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install 'jinja2"):
        report([str(folder)])


def test_the_figure_of_compare_shows_dollars_as_they_are() -> None:
    text = "a$\\frac{$"
    metrics = {"perplexity": {"quantized": {text: 9.0}}, "seconds": {"quantization": 3.0}}
    drawn = figure([Cell("rtn", 2, 0, metrics)])
    assert drawn is not None
    file = io.StringIO()
    drawn.savefig(file, format="svg")
    assert drawn.axes[0].get_ylabel() == f"perplexity, {text} (lower is better)"
