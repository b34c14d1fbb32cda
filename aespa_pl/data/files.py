"""Read the rows of a local text file.

The json reader of ``datasets`` is not used, because it turns a missing field into None and a number into a
string, and ends with StopIteration on an empty file.
"""

import gzip
import hashlib
import json
import logging
import os
import re
import stat
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from aespa_pl.errors import UserError

log = logging.getLogger(__name__)

Document = str | list[dict[str, Any]]
"""A text, or the messages of a conversation, each with ``role`` and ``content``."""
JSON_FORMATS = (".json", ".jsonl")
"""Endings of files of which every row is an object; any other file is plain text."""
FIELDS = ("text", "sentence")
"""Field of a JSON row that holds its text; PTB calls it sentence."""
MESSAGES = "messages"
"""Field of a JSON row that holds a conversation, where the row has no text."""
SENTENCE_FILES = ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt")
"""Plain texts of which every line is a row. Any other plain text is one row."""
LARGEST_TEXT = 4 * 10**9
"""Most characters of a text, five times C4's shard that the paper samples: one that never ends is refused."""
REPORT_SECONDS = 10
"""Seconds between two lines in the log about a text that is being read."""


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
        """Return the file that the user named, of which a row may hold conversations.

        Raises UserError where there is no such file, or it can't be read twice (a pipe), or is too large.
        """
        # Path.expanduser would raise RuntimeError for an unknown ~user
        file = cls(Path(os.path.expanduser(given)), key, conversations)  # noqa: PTH111
        with file._errors():
            status = file.path.stat() if file.path.exists() else None
        if status is None:
            raise UserError(
                f"{key}: {given} is neither c4, wikitext2, ptb or embedded nor an existing file; "
                f"looked for {file.path.absolute()}"
            )
        if stat.S_ISDIR(status.st_mode):
            raise UserError(f"{key}: {given} is a folder; name one file in it")
        if not stat.S_ISREG(status.st_mode):
            # its checksum is taken before it is read, so that a second run finds its tokens
            raise UserError(
                f"{key}: {given} is a pipe or a device, and a text is read twice; write it to a "
                "file and name that"
            )
        if status.st_size > LARGEST_TEXT:
            raise file.too_large()
        return file

    @property
    def name(self) -> str:
        """Return the name without .gz."""
        return self.path.name.removesuffix(".gz")

    @property
    def is_json(self) -> bool:
        """Tell whether every row of the file is an object; otherwise it is plain text."""
        return Path(self.name).suffix in JSON_FORMATS

    def too_large(self) -> UserError:
        """Return the error for a text that is longer than anyone needs, or never ends."""
        return UserError(
            f"{self.key}: {self.path} has more than {LARGEST_TEXT / 1e9:.0f} GB of text; name a part of it"
        )

    def checksum(self) -> str:
        """Return the SHA-256 of the file as it lies on the disk."""
        with self._errors(), self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def rows(self) -> list[Document]:
        """Return the file's text: one string for a plain text, a document for each row of a .json or .jsonl.

        Raises UserError where the file can't be read or decoded, is empty or too large, or a row has no text.
        """
        opened = gzip.open if self.path.suffix == ".gz" else open
        # newline="\n": plain text stays unchanged, and a lone carriage return ends no JSON line
        with self._errors(), opened(self.path, "rt", encoding="utf-8-sig", newline="\n") as file:
            lines = self._lines(file)
            rows = self._json_rows(lines) if self.is_json else self._text_rows(lines)
        if not any(row.strip() if isinstance(row, str) else row for row in rows):
            raise UserError(f"{self.key}: {self.path} holds no text; name another file")
        return rows

    def _lines(self, file: TextIO) -> Iterator[str]:
        """Yield the lines; a long text is reported, and one that does not end is refused."""
        read, reported = 0, time.monotonic()
        while line := file.readline(LARGEST_TEXT + 1):
            read += len(line)
            if read > LARGEST_TEXT:
                raise self.too_large()
            if time.monotonic() - reported > REPORT_SECONDS:
                reported = time.monotonic()
                log.warning("reading %s: %.1f GB of text so far", self.path, read / 1e9)
            yield line

    def _text_rows(self, lines: Iterator[str]) -> list[Document]:
        if self.name in SENTENCE_FILES:
            return [line.strip() for line in lines]
        text = "".join(lines)
        if "\0" in text:
            raise UserError(f"{self.key}: {self.path} is binary, expected text in UTF-8")
        return [text]

    def _json_rows(self, lines: Iterator[str]) -> list[Document]:
        rows, field = list[Document](), ""
        known = (*FIELDS, MESSAGES) if self.conversations else FIELDS
        for place, row in self._json_values(lines):
            if not isinstance(row, dict):
                raise UserError(
                    f"{self.key}: {self.path}, {place}: expected an object such as "
                    f'{{"text": "..."}}, found {type(row).__name__}'
                )
            field = field or next((name for name in known if name in row), FIELDS[0])
            document: Any = row.get(field)
            if field == MESSAGES:
                self._check_messages(document, place)
            elif not _is_text(document):
                raise UserError(
                    f"{self.key}: {self.path}, {place}: the field {field!r} is missing or not a "
                    "string of valid characters; every row needs its text in 'text' or 'sentence' "
                    f"(fields found: {', '.join(row) or 'none'})"
                )
            rows.append(document)
        return rows

    def _check_messages(self, messages: object, place: str) -> None:
        ours = isinstance(messages, list) and all(
            isinstance(message, dict) and all(_is_text(message.get(n)) for n in ("role", "content"))
            for message in messages
        )
        if not messages or not ours:
            raise UserError(
                f"{self.key}: {self.path}, {place}: the field '{MESSAGES}' is missing or is no "
                'conversation; expected a list such as [{"role": "user", "content": "..."}]'
            )

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
        except json.JSONDecodeError as error:
            raise UserError(
                f"{self.key}: {self.path}, line {number + error.lineno - 1}: {error.msg}; expected "
                "JSON lines, or one JSON array of objects"
            ) from error
        except RecursionError as error:
            raise UserError(
                f"{self.key}: {self.path}, line {number}: values are nested too deeply; expected "
                "JSON lines, or one JSON array of objects"
            ) from error

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn what can go wrong while reading into a UserError that names the key and the file."""
        try:
            yield
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self.key}: {self.path} is not text in UTF-8 ({error.reason}); convert it, or "
                "name another file"
            ) from error
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(
                f"{self.key}: {self.path} is not a whole gzip file ({error}); fetch it again"
            ) from error
        except OSError as error:
            raise UserError(f"{self.key}: cannot read {self.path}: {error.strerror or error}") from error


def _is_text(value: object) -> bool:
    """Return whether a text has no half of a surrogate pair, which JSON can hold and UTF-8 can't."""
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)
