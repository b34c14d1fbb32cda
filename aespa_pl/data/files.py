"""Rows of a local text file.

The json reader of ``datasets`` is not used: it turns a missing field into None and a number into a
string, and ends with StopIteration on an empty file.
"""

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path

from aespa_pl.errors import UserError

FORMATS = (".txt", ".json", ".jsonl")
FIELDS = ("text", "sentence")
"""Field of a JSON row that holds its text; PTB calls it sentence."""
SENTENCE_FILES = ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt")
"""Files of which every line is a row. Any other .txt is one row."""


@dataclass(frozen=True)
class TextFile:
    """A local file with text."""

    path: Path
    key: str
    """YAML key that names the file, for messages."""

    @classmethod
    def find(cls, given: str, key: str) -> "TextFile":
        """Return the file that the user named.

        Raises:
            UserError: There is no such file, or its name ends in something that we can't read.
        """
        # Path.expanduser would raise RuntimeError for an unknown ~user
        file = cls(Path(os.path.expanduser(given)), key)  # noqa: PTH111
        with file._errors():
            exists = file.path.exists()
        if not exists:
            raise UserError(
                f"{key}: {given} is neither c4, wikitext2, ptb or embedded nor an existing file; "
                f"looked for {file.path.absolute()}"
            )
        if file.path.is_dir():
            raise UserError(f"{key}: {given} is a folder; name one file in it ({_formats()})")
        if file.format not in FORMATS:
            raise UserError(f"{key}: {given} must end in {_formats()}")
        return file

    @property
    def name(self) -> str:
        """Name without .gz."""
        return self.path.name.removesuffix(".gz")

    @property
    def format(self) -> str:
        """One of FORMATS, if the file can be read."""
        return Path(self.name).suffix

    def checksum(self) -> str:
        """Return the SHA-256 of the file as it lies on the disk."""
        with self._errors(), self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def rows(self) -> list[str]:
        """Return the file's text: one string for a .txt, one for each row of a .json or .jsonl.

        Raises:
            UserError: The file can't be read or decoded, is empty, or a row has no text.
        """
        opened = gzip.open if self.path.suffix == ".gz" else open
        # newline="\n": a .txt is taken as it is, and a lone carriage return ends no JSON line
        with self._errors(), opened(self.path, "rb") as raw:
            file = TextIOWrapper(raw, encoding="utf-8-sig", newline="\n")
            rows = self._text_rows(file) if self.format == ".txt" else self._json_rows(file)
        if not any(row.strip() for row in rows):
            raise UserError(f"{self.key}: {self.path} holds no text; name another file")
        return rows

    def _text_rows(self, file: TextIOWrapper) -> list[str]:
        if self.name in SENTENCE_FILES:
            return [line.strip() for line in file]
        text = file.read()
        if "\0" in text:
            raise UserError(f"{self.key}: {self.path} is binary, expected text in UTF-8")
        return [text]

    def _json_rows(self, file: TextIOWrapper) -> list[str]:
        rows, field = [], ""
        for place, row in self._objects(file):
            field = field or next((name for name in FIELDS if name in row), FIELDS[0])
            text = row.get(field)
            if not isinstance(text, str) or not _encodable(text):
                raise UserError(
                    f"{self.key}: {self.path}, {place}: the field {field!r} is missing or not a "
                    "string of valid characters; every row needs its text in 'text' or 'sentence' "
                    f"(fields found: {', '.join(row) or 'none'})"
                )
            rows.append(text)
        return rows

    def _objects(self, file: TextIOWrapper) -> Iterator[tuple[str, dict[str, object]]]:
        for place, row in self._json_values(file):
            if not isinstance(row, dict):
                raise UserError(
                    f"{self.key}: {self.path}, {place}: expected an object such as "
                    f'{{"text": "..."}}, found {type(row).__name__}'
                )
            yield place, row

    def _json_values(self, file: TextIOWrapper) -> Iterator[tuple[str, object]]:
        """Yield where a value stands, and the value, of JSON lines or of one JSON array."""
        number = 0
        try:
            for number, line in enumerate(file, 1):
                if line.lstrip().startswith("["):
                    array = json.loads(line + file.read())
                    yield from ((f"row {i}", value) for i, value in enumerate(array, 1))
                elif line.strip():
                    yield f"line {number}", json.loads(line.rstrip())
        except json.JSONDecodeError as error:
            raise UserError(
                f"{self.key}: {self.path}, line {number + error.lineno - 1}: {error.msg}; expected "
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
            raise UserError(
                f"{self.key}: cannot read {self.path}: {error.strerror or error}"
            ) from error


def _formats() -> str:
    return f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}, also with .gz"


def _encodable(text: str) -> bool:
    """Return whether no half of a surrogate pair is in the text; JSON can hold one, UTF-8 can't."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
