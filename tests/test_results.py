"""The tables of the documents: made from the stored comparisons, with the right numbers in them."""

import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from aespa_pl.report.comparison import Cell, cells_csv
from tests.scripts import load

ROOT = Path(__file__).parent.parent


@pytest.fixture
def results() -> ModuleType:
    return load("benchmarks/results.py")


def metrics(quantized: float, processor: float, text: str = "held out") -> dict[str, Any]:
    perplexity = {"original": 10.0, "nearest": 1000.0, "quantized": quantized}
    return {
        "perplexity": {kind: {text: value} for kind, value in perplexity.items()},
        "seconds": {"total": 99.0, "processor": processor},
        "peak_bytes": {"host": 10**9},
    }


def store(folder: Path, name: str, cells: list[Cell]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.csv").write_text(cells_csv(cells))


def test_the_pages_have_the_tables_of_the_stored_comparisons(results: ModuleType) -> None:
    pages = [file.read_text(encoding="utf-8") for file in results.PAGES]
    assert [results.filled(page) for page in pages] == pages
    places = [match for page in pages for match in results.PLACE.finditer(page)]
    shown = {match[3] for match in places if match[2] == "model"}
    assert shown | {*results.MODELS} == {folder.name for folder in results.COMPARED.iterdir()}


def test_a_model_has_mean_spread_and_reasons_of_failure(
    results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "COMPARED", tmp_path)
    cells = [
        Cell("optq", 2, 0, metrics(20.0, 3.0)),
        Cell("optq", 2, 1, metrics(22.0, 5.0)),
        Cell("rtn", 2, 0, metrics(1000.0, 1.0)),
        Cell("brecq", 2, 0, failure="out of memory"),
        Cell("awq", 2, 0),
    ]
    store(tmp_path / "opt", "methods", cells)
    relative = (math.log(2) + math.log(2.2)) / 2 / math.log(100)
    assert results.model_table("opt").rows == [
        ["original", "2", "10.000", "", "", ""],
        ["nearest", "2", "1000.000", "", "", ""],
        ["rtn", "2", "1000.000", "1.000", "1", "0"],
        ["optq", "2", "21.000 ± 1.414", f"{relative:.3f}", "4", "0 1"],
        ["brecq", "2", ".; out of memory", ".", ".", "0"],
    ]


def test_each_of_several_texts_has_its_columns(
    results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "COMPARED", tmp_path)
    of_both = metrics(100.0, 3.0, "web")
    for kind, value in {"original": 20.0, "nearest": 2000.0, "quantized": 20.0}.items():
        of_both["perplexity"][kind]["wiki"] = value
    store(tmp_path / "opt", "groups", [Cell("optq", 2, 0, of_both)])
    table = results.groups_table("opt")
    assert table.head[2:6] == [
        "perplexity, web", "loss / nearest, web", "perplexity, wiki", "loss / nearest, wiki",
    ]  # fmt: skip
    assert table.rows == [
        ["original", "2", "10.000", "", "20.000", "", "", ""],
        ["nearest", "2", "1000.000", "", "2000.000", "", "", ""],
        ["optq", "2", "100.000", "0.500", "20.000", "0.000", "3", "0"],
    ]


def test_orders_have_the_spread_of_the_seeds_beside_the_paper(
    results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "COMPARED", tmp_path)
    cells = [Cell("optq", 3, seed, metrics(20.0 + seed, 3.0)) for seed in (0, 1)]
    store(tmp_path / "bloom", "methods", cells[:1])
    store(tmp_path / "bloom", "methods_more", cells[1:])
    table = results.orders_table("3")
    assert table.head == ["method", "bloom", "OPT-125M in the paper"]
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["optq"] == ["20.500 ± 0.707", "52.95"]
    assert rows["original"] == ["10.000", "27.65"]
    assert "awq" not in rows  # no model has it


def test_an_ablation_takes_each_row_from_its_comparison(
    results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "COMPARED", tmp_path)
    measured = [Cell("zfold", 2, seed, metrics(30.0 + seed, 3.0)) for seed in (0, 1, 2)]
    store(tmp_path / "opt", "methods", measured)  # seed 2 has nothing beside it
    beside = [Cell("zfold", 2, seed, metrics(25.0, 3.0)) for seed in (0, 1)]
    store(tmp_path / "opt", "hessian", beside)
    store(tmp_path / "llama", "methods", measured)  # without an ablation
    assert results.ablation_table("hessian").rows == [
        ["H", "30.500 ± 0.707", "190.1"],
        ["H_V", "25.000 ± 0.000", "146.4"],
    ]


def test_a_second_text_is_refused(results: ModuleType) -> None:
    with pytest.raises(ValueError, match="one text was expected, found perplexity a, perplexity b"):
        results.column([{"perplexity a": "1", "perplexity b": "2"}], "perplexity")


def test_rows_of_the_authors_tokens_have_mean_and_spread_over_their_seeds(
    results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "AUTHORS_TOKENS", tmp_path / "authors.csv")
    (tmp_path / "authors.csv").write_text(
        "model,bits,method,original,nearest,seed 0,seed 1,seed 2\n"
        "m,2,aespa,10,40,20,21,22\nm,2,aespa-fast,10,40,30,30,30\nm,3,aespa,10,12,11,11,11\n"
    )
    table = results.authors_table("2,4")
    assert table.head == ["model", "bits", "original", "nearest", "aespa-fast", "aespa"]
    assert table.rows == [["m", "2", "10.000", "40.000", "30.000 ± 0.000", "21.000 ± 1.000"]]


def test_files_are_beside_those_of_the_same_name_and_size(
    results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "COMPARED", tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "m/files.csv").write_text(
        "who,file,bytes,version,text,original,perplexity,kl,kl 99.9 %,same top\n"
        "aespa-fast,Q2_K,88010000,1,wiki,20,22,0.1,1,0.9\n"
        '"llama.cpp, imatrix",Q4_0,92000000,2,wiki,20,23,0.25,1,0.7\n'
        '"llama.cpp, imatrix",Q2_K,88000000,2,wiki,20,25,0.5,3,0.7\n'
        '"aespa-fast, target",88.0 MB,87990000,1,wiki,20,21,0.05,1,0.95\n'
    )
    assert results.sizes_table("m").rows == [
        ["Q2_K, 88.0 MB", "25.00", "0.500", "22.00", "0.100", "21.00", "0.050"],
        ["Q4_0, 92.0 MB", "23.00", "0.250", ".", ".", ".", "."],
    ]
    rows = results.files_table("m").rows
    assert rows[0][3] == "20.000"
    assert rows[1] == [
        "aespa-fast, target: 88.0 MB", "87,990,000", "1", "21.000", "0.0500", "1.000", "0.950",
    ]  # fmt: skip
