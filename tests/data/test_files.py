"""Every kind of local file is read, and every way in which one can be wrong is refused."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from aespa_pl.data import files
from aespa_pl.data.files import LARGEST_TEXT, Conversation, TextFile
from aespa_pl.errors import UserError

KEY = "data.calibration.source"


def rows_of(path: Path) -> list[Any]:
    return TextFile.find(str(path), KEY).rows()


def write(path: Path, content: str) -> Path:
    """Write a file, compressed if its name says so."""
    data = content.encode()
    path.write_bytes(gzip.compress(data) if path.suffix in (".gz", ".GZ") else data)
    return path


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_txt_is_one_row_as_it_is(tmp_path: Path, name: str) -> None:
    content = " first line\r\n\n second\u2028line é \n"
    assert rows_of(write(tmp_path / name, content)) == [content]


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.jsonl", "a.JSONL.GZ", "a.ndjson", "a.jl.gz"])
@pytest.mark.parametrize("layout", ["lines", "array", "indented array"])
def test_json_lines_and_arrays_are_read_under_either_name(tmp_path: Path, name: str, layout: str) -> None:
    texts = ["one", "", "two\u2028three\n", "é"]
    rows = [{"url": 3, "text": text} for text in texts]
    if layout == "lines":
        content = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n"
    else:
        content = json.dumps(rows, indent=2 if layout == "indented array" else None)
    assert rows_of(write(tmp_path / name, content)) == texts


def test_an_array_may_be_indented_as_a_whole(tmp_path: Path) -> None:
    assert rows_of(write(tmp_path / "a.json", '\n  [{"text":\n"a"}]\n')) == ["a"]


def test_the_field_may_be_called_sentence(tmp_path: Path) -> None:
    path = write(tmp_path / "ptb.json", '{"sentence": "a b"}\n{"sentence": "c"}')
    assert rows_of(path) == ["a b", "c"]


@pytest.mark.parametrize("name", ["ptb.test.txt", "ptb.train.txt.gz"])
def test_lines_of_a_ptb_file_are_rows(tmp_path: Path, name: str) -> None:
    assert rows_of(write(tmp_path / name, " a <unk> b \n c \n")) == ["a <unk> b", "c"]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    assert rows_of(write(tmp_path / "a.jsonl", '\ufeff{"text": "a"}')) == ["a"]


def test_the_home_folder_may_be_written_as_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "a.txt", "text")
    assert TextFile.find("~/a.txt", KEY).rows() == ["text"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"text": "a"}\n{"url": 1, "body": "b"}', "line 2: the field 'text' is missing"),
        ('{"url": 1, "body": "b"}', r"fields found: url, body\)"),
        ('{"sentence": "a"}\n{"text": "b"}', "line 2: the field 'sentence' is missing"),
        ("{}", r"fields found: none\)"),
        ('{"text": null}', "line 1: the field 'text' is missing or not a string of"),
        ('[{"text": "a"}, {"text": 3}]', "row 2: the field 'text' is missing or not a string of"),
        (r'{"text": "\ud800"}', "not a string of valid characters"),
        ('{"text": "a", "n": ' + "1" * 5000 + "}", "line 1: .*expected JSON lines, or one JSON array"),
        ('"a"', "line 1: expected an object .* found str"),
        ('["a"]', "row 1: expected an object .* found str"),
        ('{"text": "a"}\n{"text": "b', "line 2: .*expected JSON lines, or one JSON array"),
        ('{\n"text": "a"\n}', "line 1: .*expected JSON lines, or one JSON array"),
        ('[{"text": "a"},\n{"text": ]', "line 2: .*expected JSON lines, or one JSON array"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, content: str, words: str) -> None:
    path = write(tmp_path / "rows.jsonl", content)
    with pytest.raises(UserError, match=words) as caught:
        rows_of(path)
    assert str(caught.value).startswith(f"{KEY}: {path}, ")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.txt", b"", "holds no text"),
        ("blank.txt", b" \n\n", "holds no text"),
        ("empty.json", b"", "holds no text"),
        ("array.json", b"[]", "holds no text"),
        ("rows.jsonl", b'{"text": " "}', "holds no text"),
        ("empty.txt.gz", gzip.compress(b"", mtime=0), "holds no text"),
        ("latin.txt", "é".encode("latin-1"), "is not text in UTF-8"),
        ("latin.jsonl", '{"text": "é"}'.encode("latin-1"), "is not text in UTF-8"),
        ("wide.txt", "text".encode("utf-16-le"), "is binary"),
    ],
)
def test_a_file_that_holds_no_text_is_refused(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=words) as caught:
        rows_of(path)
    assert str(caught.value).startswith(f"{KEY}: {path} ")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("short.txt.gz", gzip.compress(b"text" * 999, mtime=0)[:-9], "Compressed file ended before"),
        ("short.json.gz", gzip.compress(b'{"text": "a"}', mtime=0)[:15], "Compressed file ended before"),
        ("plain.txt.gz", b"text", "Not a gzipped file"),
        ("broken.txt.gz", gzip.compress(b"text", mtime=0)[:10] + b"\xff" * 20, "Error -3 while"),
    ],
)
def test_a_damaged_gzip_file_is_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{KEY}: cannot read {tmp_path / name}: {words}"):
        rows_of(tmp_path / name)


@pytest.mark.parametrize("name", ["missing.txt", "c5", "missing/a.txt", "x" * 300 + ".txt"])
def test_a_wrong_path_is_named_with_the_key(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with pytest.raises(UserError) as caught:
        TextFile.find(str(path), KEY)
    assert str(caught.value).startswith(f"{KEY}: ")
    assert str(path) in str(caught.value)


def test_a_relative_path_is_shown_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="neither c4, wikitext2, ptb or embedded nor") as caught:
        TextFile.find("wikitext", KEY)
    assert str(tmp_path / "wikitext") in str(caught.value)


def test_an_unknown_user_is_a_wrong_path() -> None:
    with pytest.raises(UserError, match=r"~nobody-of-that-name/a\.txt is neither"):
        TextFile.find("~nobody-of-that-name/a.txt", KEY)


@pytest.mark.parametrize("name", ["wiki.test.raw", "a.csv", "README", "a.md.gz", "a.gz"])
def test_any_other_ending_is_plain_text(tmp_path: Path, name: str) -> None:
    assert rows_of(write(tmp_path / name, '{"text": "a"}\n b\n')) == ['{"text": "a"}\n b\n']


def test_what_is_no_file_of_a_disk_is_refused_at_once(tmp_path: Path) -> None:
    """Nobody writes to the pipe, and the device never ends: whoever opens one waits for ever."""
    os.mkfifo(tmp_path / "pipe")
    for given in (tmp_path / "pipe", "/dev/zero", tmp_path):
        with pytest.raises(UserError, match=f"{given} is a folder, a pipe or a device; name one file"):
            TextFile.find(str(given), KEY)


def test_a_file_of_more_than_the_limit_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "sparse.txt"
    with path.open("wb") as file:
        file.truncate(LARGEST_TEXT + 1)
    with pytest.raises(UserError, match="has more than 4 GB of text; name a part"):
        TextFile.find(str(path), KEY)


@pytest.mark.parametrize("name", ["bomb.txt.gz", "bomb.jsonl.gz"])
def test_a_text_that_unpacks_without_end_is_given_up(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LARGEST_TEXT", 10**7)
    path = write(tmp_path / name, "a" * (2 * 10**7))
    assert path.stat().st_size < 10**5
    with pytest.raises(UserError, match=r"has more than 0 GB of text"):
        rows_of(path)


@pytest.mark.parametrize("layout", ['{"text": "a"}\n%s', "[%s]"])
def test_json_nested_without_end_is_refused(tmp_path: Path, layout: str) -> None:
    path = write(tmp_path / "a.jsonl", layout % ("[" * 200_000))
    with pytest.raises(UserError, match="values are nested too deeply"):
        rows_of(path)


def test_a_file_that_goes_away_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "text")
    file = TextFile.find(str(path), KEY)
    path.unlink()
    for read in [file.rows, file.checksum]:
        with pytest.raises(UserError, match=f"^{KEY}: cannot read {path}: No such file"):
            read()


def test_the_checksum_is_that_of_the_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "abc")
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2
    assert TextFile.find(str(path), KEY).checksum() == expected


@pytest.mark.parametrize(
    ("messages", "right"),
    [
        ([{"role": "user", "content": "a"}], True),
        ([], False),
        ("a", False),
        ([1], False),
        ([{"role": "user"}], False),
        ([{"role": "user", "content": [{"type": "image"}]}], False),
        ([{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}], False),
        ([{"role": "user", "content": []}], False),
        ([{"role": "assistant", "content": None, "tool_calls": []}], False),
        ([{"role": "user", "content": 1}], False),
        ([{"role": "user", "content": "\ud800"}], False),
    ],
)
def test_conversations_are_read_where_they_may_be(tmp_path: Path, messages: Any, right: bool) -> None:
    path = write(tmp_path / "a.jsonl", json.dumps({"messages": messages}))
    if right:
        assert TextFile.find(str(path), KEY, conversations=True).rows() == [Conversation(messages)]
    else:
        with pytest.raises(UserError, match=r"line 1: .*'messages' .* or not a conversation such as"):
            TextFile.find(str(path), KEY, conversations=True).rows()
    alone = "known are text, sentence, and for calibration alone messages; fields found: messages"
    with pytest.raises(UserError, match=rf"the field 'text' is missing .* \({alone}\)"):
        TextFile.find(str(path), KEY).rows()
    path.write_text(json.dumps({"conversations": messages}))
    with pytest.raises(UserError, match=r"\(known are text, sentence, messages; fields found: conversations"):
        TextFile.find(str(path), KEY, conversations=True).rows()


def test_parts_and_calls_of_tools_are_messages_with_a_text(tmp_path: Path) -> None:
    """Templates would write others as Python does."""
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "assistant", "tool_calls": calls},
    ]  # fmt: skip
    path = write(tmp_path / "a.jsonl", json.dumps({"messages": messages}))
    assert TextFile.find(str(path), KEY, conversations=True).rows() == [Conversation([
        {"role": "user", "content": "ab"}, {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ])]  # fmt: skip


@pytest.mark.parametrize(
    ("tools", "found"),
    [
        ([{"name": "f"}], [{"name": "f"}]),
        ('[{"name": "f"}]', [{"name": "f"}]),
        (None, None),
        ({"name": "f"}, "wrong"),
        ("f", "wrong"),
        (["f"], "wrong"),
    ],
)
def test_tools_of_a_conversation_are_read(tmp_path: Path, tools: object, found: Any) -> None:
    messages = [{"role": "user", "content": "a"}]
    path = write(tmp_path / "a.jsonl", json.dumps({"messages": messages, "tools": tools}))
    file = TextFile.find(str(path), KEY, conversations=True)
    if found == "wrong":
        with pytest.raises(UserError, match=r"line 1: the field 'tools' is not a list of JSON objects"):
            file.rows()
    else:
        assert file.rows() == [Conversation(messages, found)]


def test_a_row_with_a_text_and_a_conversation_gives_its_text(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "a"}], "text": "b"}
    path = write(tmp_path / "a.jsonl", json.dumps(row))
    assert TextFile.find(str(path), KEY, conversations=True).rows() == ["b"]
