"""Each run gets a folder with a number of its own."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aespa_pl.run.find import version_number
from aespa_pl.run.folder import next_version
from tests.disks import files, full, refused


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        ((), 0),
        (("version_0",), 1),
        (("version_0", "version_5"), 6),  # a gap is not filled
        (("version_9", "version_10"), 11),  # numbers, not text
        (("version_3", "version_x", "version_", "version_-7", "other_8"), 4),
    ],
)
def test_next_version_is_above_all(present: tuple[str, ...], expected: int, tmp_path: Path) -> None:
    for name in present:
        (tmp_path / name).mkdir()
    made = next_version(tmp_path)
    assert made == tmp_path / f"version_{expected}"
    assert made.is_dir()
    assert len(files(tmp_path)) == len(present) + 1
    assert version_number(made) == expected


def test_a_version_that_is_a_file_is_taken(tmp_path: Path) -> None:
    (tmp_path / "version_2").write_text("a file")
    assert next_version(tmp_path).name == "version_3"


def test_next_version_makes_the_folder_of_runs(tmp_path: Path) -> None:
    assert next_version(tmp_path / "runs" / "aespa") == tmp_path / "runs" / "aespa" / "version_0"


def test_another_process_that_is_faster_gets_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version_0").mkdir()
    glob = Path.glob

    def then_two_appear(self: Path, pattern: str) -> Iterator[Path]:
        found = list(glob(self, pattern))
        (tmp_path / "version_1").mkdir()
        (tmp_path / "version_2").mkdir()
        return iter(found)

    monkeypatch.setattr(Path, "glob", then_two_appear)
    assert next_version(tmp_path).name == "version_3"


def test_versions_made_at_once_are_different(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(next_version, [tmp_path] * 40))
    assert sorted(version_number(path) for path in made) == list(range(40))


def test_next_version_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "mkdir", full)
    with refused(tmp_path):
        next_version(tmp_path)


def test_file_in_place_of_the_folder_of_runs_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with refused(tmp_path / "runs" / "run", "Not a directory"):
        next_version(tmp_path / "runs" / "run")
    with refused(tmp_path / "runs", "File exists"):
        next_version(tmp_path / "runs")
