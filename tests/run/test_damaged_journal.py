"""A journal that is damaged, or of another format, is refused in one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from aespa_pl.errors import UserError
from aespa_pl.run.journal import Run
from aespa_pl.run.schema import FORMAT
from tests.run.journals import RECORD, make_file


def test_journal_of_another_format_is_refused(run: Run) -> None:
    content = json.loads(run.journal_file.read_text())
    for other, why in ((FORMAT + 1, "less"), (FORMAT - 1, "greater")):
        run.journal_file.write_text(json.dumps({**content, "format": other, "more": content}))
        assert f"(format: Input should be {why} than or equal to {FORMAT})" in refuse_as_damaged(run)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"{}", b'{"format": "2"}', b"\xff\xfe\x00", b"[" * 100_000],
    ids=range(8),
)
def test_journal_that_is_none_is_refused(content: bytes, run: Run) -> None:
    run.journal_file.write_bytes(content)
    refuse_as_damaged(run)


def refuse_as_damaged(run: Run) -> str:
    """Check that a journal is called damaged in one line; return the reason."""
    with pytest.raises(UserError) as caught:
        Run.open(run.folder)
    message = str(caught.value)
    assert message.startswith(f"{run.journal_file} is damaged, or of another version of aespa-pl (")
    assert message.endswith("): start a new run")
    assert message.count(str(run.journal_file)) == 1
    assert len(message.splitlines()) == 1
    return message


LEARNED = {"block": 1, "key": "q", "file": "a", "checksum": "b"}
DAMAGES: list[tuple[str, Any]] = [
    ("fingerprint", None), ("fingerprint", []),
    ("blocks", []), ("blocks", {"x": {**RECORD, "files": {}}}),
    ("blocks.0", {}), ("blocks.0", None), ("blocks.0.losses", {"q": 1.0}),
    ("blocks.0.losses.q.final", "low"), ("blocks.0.losses.q.final", float("nan")),
    ("blocks.0.seconds", None), ("blocks.0.seconds", "3"), ("blocks.0.seconds.grid", "3"),
    ("blocks.0.files", []), ("blocks.0.files", {"a": 1}),
    ("checkpoint", {}), ("checkpoint", "a"), ("checkpoint", {**LEARNED, "block": "1"}),
    ("checkpoint", {**LEARNED, "key": None}),
    ("portions", {}), ("portions", [{}]), ("portions", ["a"]),
    ("damping", {"0": "x"}), ("damping", []), ("damping", {"x": 0.1}),
    ("model", []), ("model", {"a": 1}),
    # files elsewhere, which would be removed as damaged
    ("model", {"../a": "b"}), ("model", {"/a": "b"}), ("model", {"a\\..\\b": "b"}), ("model", {"": "b"}),
    ("blocks.0.files", {"x/../../a": "b"}), ("checkpoint", {**LEARNED, "file": "/a"}),
]  # fmt: skip
MISSING = [
    "fingerprint", "blocks", "checkpoint", "portions", "damping", "model",
    "blocks.0.losses", "blocks.0.seconds", "blocks.0.files",
]  # fmt: skip


def journal_with_a_block(run: Run) -> dict[str, Any]:
    """Return the content of a journal that is not damaged."""
    run.finish_block(0, RECORD, [make_file(run.block_file(0))])
    Run.open(run.folder)
    content: dict[str, Any] = json.loads(run.journal_file.read_text())
    return content


def inside(content: dict[str, Any], path: str) -> tuple[dict[str, Any], str]:
    """Return the mapping that a dotted path leads to, and the last key."""
    *before, last = path.split(".")
    for key in before:
        content = content[key]
    return content, last


@pytest.mark.parametrize(("path", "value"), DAMAGES)
def test_damaged_value_is_refused(path: str, value: Any, run: Run) -> None:
    content = journal_with_a_block(run)
    where, key = inside(content, path)
    where[key] = value
    run.journal_file.write_text(json.dumps(content))
    refuse_as_damaged(run)


@pytest.mark.parametrize("path", MISSING)
def test_missing_value_is_refused_by_its_name(path: str, run: Run) -> None:
    content = journal_with_a_block(run)
    where, key = inside(content, path)
    del where[key]
    run.journal_file.write_text(json.dumps(content))
    assert f"({path}: " in refuse_as_damaged(run)


def test_folder_without_a_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not the folder of a run: journal.json cannot be read"):
        Run.open(tmp_path)
