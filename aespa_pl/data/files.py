"""Read the rows of a local text file.

The json reader of ``datasets`` turns a missing field into None, and a number into a string.
"""

import gzip
import json
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TextIO

from pydantic import AfterValidator, BaseModel, Field, Json, TypeAdapter, ValidationError, model_validator

from aespa_pl.errors import UserError
from aespa_pl.paths import expanded
from aespa_pl.storage.files import checksum

SENTENCE_FILES = ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt")
"""Plain texts of which every line is a row. Any other plain text is one row."""
JSON_ENDINGS = (".json", ".jsonl", ".ndjson", ".jl")
"""Endings, in small or capital letters, of files whose rows are objects; .gz may follow."""
LARGEST_TEXT = 4 * 10**9
"""Most characters of a text, five times C4's shard that the paper samples: one that never ends is refused."""


@dataclass(frozen=True)
class Conversation:
    """Holds what a chat template makes a text of."""

    messages: list[dict[str, Any]]
    """Each with ``role`` and ``content``."""
    tools: list[dict[str, Any]] | None = None
    """Functions that the model may call, as JSON schemas."""


Document = str | Conversation


def _encodable(text: str) -> str:
    text.encode()  # ValueError for half of a surrogate pair, which JSON can hold and UTF-8 can't
    return text


Text = Annotated[str, AfterValidator(_encodable)]


class _Part(BaseModel):
    type: Literal["text"]
    text: Text


class _Message(BaseModel):
    role: Text
    content: Text | Annotated[list[_Part], Field(min_length=1)] | None = None
    tool_calls: list[Any] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError("neither content nor tool_calls")
        return self


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content is a text, as templates expect: of parts, or of a tool's call none."""
    content = message.get("content") or ""
    return message | {"content": content if isinstance(content, str) else "".join(p["text"] for p in content)}


_TOOLS = TypeAdapter[Any](list[dict[str, Any]] | Json[list[dict[str, Any]]] | None)
_TEXT = TypeAdapter[Any](Text), "a string of valid characters"
_CONVERSATION = (
    TypeAdapter[Any](Annotated[list[_Message], Field(min_length=1)]),
    'a conversation such as [{"role": "user", "content": "..."}]',
)
FIELDS = {"text": _TEXT, "sentence": _TEXT, "messages": _CONVERSATION}
"""Field of a JSON row that may hold its document, with its check and what is expected; PTB has sentences. The
first field that the first row has counts."""


@dataclass(frozen=True)
class TextFile:
    """Reads a local file with text."""

    path: Path
    key: str
    """YAML key that names the file, for messages."""
    conversations: bool = False
    """Whether a row may hold a conversation."""

    @classmethod
    def find(cls, given: str, key: str, *, conversations: bool = False) -> "TextFile":
        """Return the file that the user named. Raises UserError if it is missing, too large, or a pipe."""
        file = cls(expanded(given), key, conversations)
        with file._errors():
            status = file.path.stat() if file.path.exists() else None
        if status is None:
            raise UserError(
                f"{key}: {given} is neither c4, wikitext2, ptb or embedded nor an existing file; "
                f"looked for {file.path.absolute()}"
            )
        if not stat.S_ISREG(status.st_mode):
            # its checksum is taken before it is read, so that a second run finds its tokens
            raise UserError(
                f"{key}: {given} is a folder, a pipe or a device; name one file, because it is read twice"
            )
        if status.st_size > LARGEST_TEXT:
            raise file.too_large()
        return file

    @property
    def name(self) -> str:
        """Return the name without .gz."""
        return self.path.stem if self.is_compressed else self.path.name

    @property
    def is_compressed(self) -> bool:
        """Tell whether the file's name ends in .gz."""
        return self.path.suffix.lower() == ".gz"

    @property
    def is_json(self) -> bool:
        """Tell whether every row of the file is an object; otherwise it is plain text."""
        return Path(self.name).suffix.lower() in JSON_ENDINGS

    def too_large(self) -> UserError:
        """Return the error for a text that is longer than anyone needs, or never ends."""
        most = f"{LARGEST_TEXT / 1e9:.0f} GB of text"
        return UserError(f"{self.key}: {self.path} has more than {most}; name a part of it")

    def checksum(self) -> str:
        """Return the SHA-256 of the file as it lies on the disk."""
        with self._errors():
            return checksum(self.path)

    def rows(self) -> list[Document]:
        """Return the file's text: one string for a plain text, a document for each row of JSON.

        Raises UserError where the file can't be read or decoded, is empty or too large, or a row has no text.
        """
        opened = gzip.open if self.is_compressed else open
        # newline="\n": plain text stays unchanged, and a lone carriage return ends no JSON line
        with self._errors(), opened(self.path, "rt", encoding="utf-8-sig", newline="\n") as file:
            lines = self._lines(file)
            rows = self._json_rows(lines) if self.is_json else self._text_rows(lines)
        if not any(row.strip() if isinstance(row, str) else row for row in rows):
            raise UserError(f"{self.key}: {self.path} holds no text; name another file")
        return rows

    def _lines(self, file: TextIO) -> Iterator[str]:
        """Yield the lines; a text that does not end is refused."""
        left = LARGEST_TEXT
        while line := file.readline(left + 1):
            if (left := left - len(line)) < 0:
                raise self.too_large()
            yield line

    def _text_rows(self, lines: Iterator[str]) -> list[Document]:
        if self.name in SENTENCE_FILES:
            return [line.strip() for line in lines]
        text = "".join(lines)
        if "\0" in text:
            raise UserError(f"{self.key}: {self.path} is binary, expected text in UTF-8")
        return [text]

    def _json_rows(self, lines: Iterator[str]) -> list[Document]:
        known = [field for field in FIELDS if self.conversations or FIELDS[field] is _TEXT]
        names = ", ".join(known) + ("" if self.conversations else ", and for calibration alone messages")
        rows, field = list[Document](), ""
        for place, row in self._json_values(lines):
            if not isinstance(row, dict):
                found = f'expected an object such as {{"text": "..."}}, found {type(row).__name__}'
                raise UserError(f"{self.key}: {self.path}, {place}: {found}")
            field = field or next((name for name in known if name in row), known[0])
            check, expected = FIELDS[field]
            try:
                check.validate_python(row.get(field))
            except ValidationError as error:
                raise UserError(
                    f"{self.key}: {self.path}, {place}: the field {field!r} is missing or not {expected} "
                    f"(known are {names}; fields found: {', '.join(row) or 'none'})"
                ) from error
            rows.append(row[field] if isinstance(row[field], str) else self._conversation(row, place))
        return rows

    def _conversation(self, row: dict[str, Any], place: str) -> Conversation:
        try:
            tools = _TOOLS.validate_python(row.get("tools"))
        except ValidationError as error:
            raise UserError(
                f"{self.key}: {self.path}, {place}: the field 'tools' is not a list of JSON objects, one for "
                "each function, nor the text of such a list: correct it, or leave it out"
            ) from error
        return Conversation([*map(_with_text, row["messages"])], tools)

    def _json_values(self, lines: Iterator[str]) -> Iterator[tuple[str, object]]:
        """Yield where a value stands, and the value, of JSON lines or of one JSON array."""
        number = 0
        try:
            for number, line in enumerate(lines, 1):
                if line.lstrip().startswith("["):
                    array = json.loads(line + "".join(lines))
                    yield from ((f"row {i}", value) for i, value in enumerate(array, 1))
                elif line.strip():
                    yield f"line {number}", json.loads(line.rstrip())
        except UnicodeDecodeError:
            raise
        except (ValueError, RecursionError) as error:
            reason = "values are nested too deeply" if isinstance(error, RecursionError) else str(error)
            if isinstance(error, json.JSONDecodeError):
                number, reason = number + error.lineno - 1, error.msg
            where, expected = f"{self.path}, line {number}", "JSON lines, or one JSON array of objects"
            raise UserError(f"{self.key}: {where}: {reason}; expected {expected}") from error

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn what can go wrong while reading into a UserError that names the key and the file."""
        try:
            yield
        except UnicodeDecodeError as error:
            why = f"is not text in UTF-8 ({error.reason}); convert it, or name another file"
            raise UserError(f"{self.key}: {self.path} {why}") from error
        except (OSError, EOFError, zlib.error) as error:  # the last two: of gzip
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"{self.key}: cannot read {self.path}: {reason}") from error
