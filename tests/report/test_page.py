"""The sentences of the page say what the numbers say, and what is missing is named with its reason."""

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import pytest
from torch.utils.tensorboard import SummaryWriter

from aespa_pl.commands.report import report
from aespa_pl.curve_names import ATTENTION, FEED_FORWARD, HELD_BACK, TUNING, tag
from aespa_pl.errors import UserError
from aespa_pl.evaluation.table import result_table
from aespa_pl.report.stored import read_run
from tests.report.pages import EVERY_FIGURE, write_page
from tests.report.simulated import simulate

if find_spec("matplotlib") is None or find_spec("jinja2") is None:
    pytest.skip(
        "matplotlib is not installed: pip install 'aespa-pl[report]'", allow_module_level=True
    )

from matplotlib.patches import Rectangle

from aespa_pl.report import costs, maps, page, results, tuning


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the figures of a page empty, as it takes seconds to draw them: words are looked at."""
    monkeypatch.setattr("aespa_pl.report.picture.Picture.svg", '<svg viewBox="0 0 1 1"></svg>')


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("options", [{"extras": False}, {"learned": False}, {"finished": False}])
def test_what_a_run_has_not_stored_is_named_with_its_reason(
    tmp_path: Path, options: dict[str, bool]
) -> None:
    folder = simulate(tmp_path / "run/version_0", 2, **options)
    text = write_page(tmp_path / "page", folder).read_text()
    missing = set(re.findall(r'<li id="([^"]*)"><b>', text))
    expected = {
        "extras": {
            "accuracies",
            "output-error",
            "rounding-variables",
            "memory",
            "tuning",
            "tuning-curves",
        },
        "learned": {"loss-curves", "moved", "rounding-variables", "tuning-curves"},
        "finished": {"perplexities", "accuracies"},
    }[next(iter(options))]
    assert missing == expected
    assert missing | set(re.findall(r'<figure id="([^"]*)"', text)) == EVERY_FIGURE


@pytest.mark.usefixtures("undrawn")
def test_a_run_without_a_finished_block_still_gives_a_page(tmp_path: Path) -> None:
    folder = simulate(tmp_path / "run/version_0", 0, finished=False)
    text = write_page(tmp_path / "page", folder).read_text()
    assert "No block is finished yet" in text
    assert "0 blocks are finished" in text


@pytest.mark.usefixtures("undrawn")
def test_settings_that_differ_come_first(tmp_path: Path) -> None:
    folders = [simulate(tmp_path / f"run_{bits}/version_0", 1, bits=bits) for bits in (2, 4)]
    table = page.differences([read_run(folder) for folder in folders])
    assert table.rows == [["quantization.bits", "2", "4"]]
    text = write_page(tmp_path / "page", *folders).read_text()
    assert text.index('id="differences"') < text.index('id="results"')


def test_the_verdict_is_the_arithmetic_of_the_perplexities(tmp_path: Path) -> None:
    folder = simulate(tmp_path / "run/version_0", 1)
    perplexity = {"original": {"t": 10.0}, "nearest": {"t": 1000.0}, "quantized": {"t": 10.9}}
    (folder / "metrics.json").write_text(json.dumps({"perplexity": perplexity}))
    # ln(1.09) / ln(100) = 0.0187: 98 % of the loss in nats is avoided
    assert results.verdict(read_run(folder)) == (
        "The quantized model is close to the original: it loses up to 10 % in perplexity. On t it goes from "
        "10.00 to 10.90 (+9 %); round-to-nearest would give 1000.00, so 98 % of its loss (in nats) is "
        "avoided."
    )


def test_later_measurements_are_shown_instead_of_the_runs_own(tmp_path: Path) -> None:
    folder = simulate(tmp_path / "run/version_0", 1, extras=False)
    later = {"perplexity": {"original": {"c4": 10.0}, "quantized": {"c4": 11.0}}}
    (folder / "test.json").write_text(json.dumps(later))
    table = page.result_table([read_run(folder)])
    assert table.head[:3] == ["", "perplexity, wikitext2", "perplexity, c4"]
    assert [row[:3] for row in table.rows] == [
        ["original", "20.000", "10.000"],
        ["round-to-nearest", "300.000", "-"],
        ["quantized", "27.000", "11.000"],
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


def test_the_worst_projection_is_named(tmp_path: Path) -> None:
    folder = simulate(tmp_path / "run/version_0", 3)
    path = folder / "journal.json"
    journal = json.loads(path.read_text())
    journal["blocks"]["1"]["losses"]["v_proj"] |= {"nearest": 2.0, "final": 3.0}
    path.write_text(json.dumps(journal))
    run = read_run(folder)
    picture = maps.final_loss_map(run, 10, (0, 2))
    assert "Least is gained in v_proj of block 1 (1.50)" in picture.caption
    assert "1 are worse than nearest rounding" in picture.caption
    assert "v_proj of block 1 (1.50)" in page.where_lost(run)


def test_tuning_is_told_from_the_journal(tmp_path: Path) -> None:
    folder = simulate(tmp_path / "run/version_0", 3)
    path = folder / "journal.json"
    journal = json.loads(path.read_text())
    for block, (start, end) in enumerate([(0.4, 0.1), (0.5, 0.25), (0.3, 0.27)]):
        journal["blocks"][str(block)]["tuning"] |= {"start_error": start, "error": end}
    journal["tuned"] = {"start_error": 0.031, "error": 0.025}
    path.write_text(json.dumps(journal))
    run = read_run(folder)
    figure = tuning.tuning_errors(run, 10).figure
    assert figure is not None
    # a mean over tokens, each divided by its own size, and not a ratio of sums
    assert figure.get_supylabel().startswith("squared error of a token, relative to\nits size")
    assert tuning.tuning_errors(run, 10).caption == (
        "Tuning leaves 0.50 of a block's error (median), least in block 0 (0.25), most in block 2 (0.90). "
        "Tuning of the model end to end then took its error from 0.031 to 0.025."
    )
    # the last of the four epochs: 0.0082 / 0.4, 0.0164 / 0.5, 0.0246 / 0.3
    assert "ends at 0.03 of the error before tuning" in tuning.tuning_curves(run, 10).caption
    assert "In 3 of them an earlier epoch was better" in tuning.tuning_curves(run, 10).caption


def test_the_seconds_of_the_end_to_end_tuning_are_drawn_and_told(tmp_path: Path) -> None:
    folder = simulate(tmp_path / "run/version_0", 2)
    without = costs.seconds(read_run(folder), 10)
    path = folder / "journal.json"
    journal = json.loads(path.read_text())
    journal["tuned"] = {"start_error": 0.2, "error": 0.1, "seconds": {"tuning the model": 60.0}}
    path.write_text(json.dumps(journal))
    found = costs.seconds(read_run(folder), 10)
    assert without.figure is not None
    assert found.figure is not None
    drawn, more = (
        sum(cast(Rectangle, patch).get_height() for patch in figure.axes[0].patches)
        for figure in (without.figure, found.figure)
    )
    assert more == pytest.approx(drawn + 60.0)
    told = " Tuning of the model end to end, the bar on the right, took 60.0 s."
    assert found.caption.endswith(told)
    assert "end to end" not in without.caption


def test_memory_is_told_in_the_gigabytes_of_all_other_tables(tmp_path: Path) -> None:
    folder = simulate(tmp_path / "run/version_0", 2)
    path = folder / "metrics.json"
    peak = {"peak_bytes": {"host": 2_500_000_000, "device": 0}}
    path.write_text(json.dumps(json.loads(path.read_text()) | peak))
    caption = costs.memory(read_run(folder), 10).caption
    assert caption.startswith("The run took 2.50 GB of host memory at its peak. From")


def test_both_sublayers_of_a_tuning_are_told(tmp_path: Path) -> None:
    """The attention's errors stand in its curve alone, the feed-forward network's in the journal."""
    folder = simulate(tmp_path / "run/version_0", 1, extras=False)
    for unit, errors in ((ATTENTION, (0.4, 0.1, 0.2)), (FEED_FORWARD, (0.8, 0.6, 0.4))):
        with SummaryWriter(str(folder / f"block_000_{unit}")) as writer:
            for epoch, error in enumerate(errors):
                writer.add_scalar(tag(TUNING, HELD_BACK), error, 30 * epoch)
    path = folder / "journal.json"
    journal = json.loads(path.read_text())
    journal["blocks"]["0"]["tuning"] = {"start_error": 0.8, "error": 0.4}
    path.write_text(json.dumps(journal))
    run = read_run(folder)
    before_and_after, during = tuning.tuning_errors(run, 10), tuning.tuning_curves(run, 10)
    for picture in (before_and_after, during):
        assert picture.figure is not None
        titles = [axes.get_title() for axes in picture.figure.axes]
        assert titles == ["attention", "feed-forward network"]
    # 0.1 / 0.4 and 0.4 / 0.8; at the end 0.2 / 0.4 and again 0.4 / 0.8
    assert "leaves 0.25 of the error behind the attention (median)" in before_and_after.caption
    assert "leaves 0.50 of the error behind the feed-forward" in before_and_after.caption
    assert "of the attention ends at 0.50" in during.caption
    assert "In 1 of them" in during.caption
    assert "of the feed-forward network ends at 0.50" in during.caption
    assert "In 0 of them" in during.caption


@pytest.mark.usefixtures("undrawn")  # on the page; the files are drawn
def test_figures_are_written_beside_the_page(tmp_path: Path) -> None:
    folder = simulate(tmp_path / "run/version_0", 2)
    report([str(folder)], figures="png")
    files = sorted(path.name for path in (folder / "report" / "figures").iterdir())
    assert files == sorted(f"{name}.png" for name in EVERY_FIGURE)
    assert (folder / "report" / "report.html").is_file()
    assert (folder / "report" / "figures" / "seconds.png").read_bytes()[:4] == b"\x89PNG"


def test_without_a_plotting_library_the_user_reads_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = simulate(tmp_path / "run/version_0", 1, learned=False)
    for name in [
        name for name in sys.modules if name.startswith(("matplotlib", "aespa_pl.report.p"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install 'aespa-pl\[report\]'"):
        report([str(folder)])
