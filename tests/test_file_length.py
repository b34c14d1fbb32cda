"""A file is short enough to be read at once."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("aespa_pl", "benchmarks", "scripts", "tests")
MOST = 300


def test_no_python_file_has_more_than_300_lines() -> None:
    files = [*ROOT.glob("*.py"), *(f for name in FOLDERS for f in (ROOT / name).rglob("*.py"))]
    lines = {
        file.relative_to(ROOT).as_posix(): len(file.read_text(encoding="utf-8").splitlines())
        for file in files
    }
    assert len(lines) > 100
    assert {file: count for file, count in lines.items() if count > MOST} == {}
