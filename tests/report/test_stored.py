"""What a run has stored is found and read; what is missing or damaged is said."""

import copy
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from aespa_pl.report.stored import StoredRun, read_run, read_runs

pytest.importorskip("matplotlib", reason="pip install '.[report]'")

from aespa_pl.report import page
from tests.report.simulated import PROJECTIONS, simulate


def test_losses_and_settings_are_those_that_were_stored(tmp_path: Path) -> None:
    folder = simulate(tmp_path / "a/version_0", 2, bits=3)
    run = read_run(folder)
    journal = json.loads((folder / "journal.json").read_text())
    assert run.losses[1, "v_proj"] == journal["blocks"]["1"]["losses"]["v_proj"]
    assert list(dict.fromkeys(name for _, name in run.losses)) == list(PROJECTIONS)
    assert run.settings["quantization.bits"] == 3
    assert run.notes == ()


def test_a_run_without_metrics_says_so_and_how_to_go_on(tmp_path: Path) -> None:
    folder = simulate(tmp_path / "a name/version_0", 2, finished=False)
    run = read_run(folder)
    (note,) = run.notes
    assert "still going, or it was stopped. Blocks that are finished: 2" in note
    continued = shlex.split(note.partition("Continue it with: ")[2])
    assert continued == ["aespa-pl", "fit", "--ckpt_path", str(folder)]
    assert shlex.split(run.command) == ["aespa-pl", "fit", "--config", str(folder / "config.yaml")]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("metrics.json", "metrics.json is damaged"),
        ("config.yaml", "config.yaml cannot be read"),
        ("model/quantization.json", "quantization.json is damaged"),
    ],
)
def test_a_damaged_file_costs_its_own_figures_only(tmp_path: Path, name: str, words: str) -> None:
    folder = simulate(tmp_path / "a/version_0", 2)
    (folder / name).write_text("{ : damaged")
    run = read_run(folder)
    assert [words in note for note in run.notes] == [True]
    assert len(run.losses) == 2 * len(PROJECTIONS)


WRONG = [None, [], {}, "a", 1, True, -1, 1e999, [1], {"a": "b"}, {"a": {"b": "c"}}, {"a": {"b": {}}}]
"""Values of every other kind than a key should have."""
PAGE_OF_METRICS = [("perplexity",), ("perplexity", "quantized"), ("perplexity", "original", "c4"),
                   ("seconds",), ("seconds", "quantization"), ("peak_bytes",), ("tasks",),
                   ("tasks", "quantized", "piqa"), ("tasks", "quantized", "piqa", "value"), ("size",),
                   ("size", "quantized"), ("test_seconds",)]  # fmt: skip


def put(content: dict[str, Any], keys: tuple[str, ...], value: object) -> None:
    for key in keys[:-1]:
        content = content.setdefault(key, {})
    content[keys[-1]] = value


@pytest.mark.parametrize("name", ["metrics.json", "test.json"])
@pytest.mark.parametrize("keys", PAGE_OF_METRICS, ids=str)
def test_any_shape_of_the_metrics_gives_a_page(tmp_path: Path, name: str, keys: tuple[str, ...]) -> None:
    folder = simulate(tmp_path / "a/version_0", 1)
    metrics = json.loads((folder / "metrics.json").read_text())
    for wrong in WRONG:
        changed = copy.deepcopy(metrics)
        put(changed, keys, wrong)
        (folder / name).write_text(json.dumps(changed))
        run = read_run(folder)
        tables(run)
    assert [note.startswith(f"{name} is damaged (") for note in run.notes] == [True]


@pytest.mark.parametrize("content", ["", "[]", "a: [", "\xff", "1: {2: 3}", "quantization: {bits: []}"])
def test_any_shape_of_the_settings_gives_a_page(tmp_path: Path, content: str) -> None:
    folder = simulate(tmp_path / "a/version_0", 1)
    (folder / "config.yaml").write_text(content, encoding="latin-1")
    tables(read_run(folder))


def tables(run: StoredRun) -> None:
    """Make all words and tables of the page."""
    page.verdict(run)
    page.where_lost(run)
    for table in (
        page.result_table([run, run]),
        page.by_key([run], [page.costs_of(run)]),
        page.by_key([run], [run.settings]),
        page.by_key([run], [run.versions]),
    ):
        assert all(len(row) == len(table.head) for row in table.rows)


def test_runs_of_one_name_are_told_apart_by_the_folder_before_it(tmp_path: Path) -> None:
    places = ("a/run/version_0", "b/run/version_0", "b/other/version_0")
    folders = [simulate(tmp_path / place, 1) for place in places]
    assert [run.name for run in read_runs(folders)] == [*places[:2], "other/version_0"]
    deeper = ("a/logs/run/version_0", "b/logs/run/version_0")
    folders = [simulate(tmp_path / place, 1) for place in deeper]
    assert [run.name for run in read_runs(folders)] == [*deeper]
    assert len(read_runs(folders[:1] * 2)) == 2  # one run by two paths has one name
