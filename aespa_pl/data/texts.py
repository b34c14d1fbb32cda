"""Find the texts for calibration and evaluation, and make documents of their rows.

Source: Section 4.1 of the paper, which follows OPTQ: perplexity is measured on one string.
"""

import hashlib
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from aespa_pl.data.files import SENTENCE_FILES, Document, TextFile
from aespa_pl.errors import UserError, first_line
from aespa_pl.paths import expanded
from aespa_pl.storage.files import checksum

log = logging.getLogger(__name__)

CALIBRATION_KEY = "data.calibration.source"
EVALUATION_KEY = "data.evaluation.texts"
EMBEDDED = resources.files("aespa_pl") / "embedded"
NAME = re.compile(r"[!-~]*|\S+\.[A-Za-z][A-Za-z0-9]{0,6}")
"""Matches what may name a text: ASCII, or letters and an ending. Chinese texts have no spaces either."""
LONGEST_NAME = 255
"""Most bytes in the name of a file that isn't there; a longer string is a text."""


@dataclass(frozen=True)
class Protocol:
    """Says how the rows of a text become documents."""

    separator: str | None
    """Text between rows that make one document; None: every row is a document."""
    first_rows: int | None = None
    """Number of rows that are used; None: all."""
    max_segments: int | None = None
    """Segments that are evaluated unless the user asks for another number."""

    def documents(self, rows: Sequence[Document]) -> Sequence[Document]:
        """Return the documents that ``rows`` make; conversations are never joined."""
        if self.separator is None:
            return rows
        return [self.separator.join(map(str, rows[: self.first_rows]))]


AS_THEY_ARE = Protocol(None)
PARAGRAPHS = Protocol("\n\n")
SENTENCES = Protocol(" ")
C4_EVALUATION = Protocol(" ", first_rows=1100, max_segments=256)


@dataclass(frozen=True)
class Text:
    """Stands for a text, which is read when it is needed."""

    source: str
    """Name or path, as the user wrote it."""
    identity: Mapping[str, object]
    """What tells different texts apart."""
    protocol: Protocol
    documents: Callable[[], Sequence[Document]]
    """Reads the text, of evaluation one document. Raises UserError where it can't be had."""


@dataclass(frozen=True)
class HubRows:
    """Names one split of a data set, or one file of it."""

    repository: str
    split: str
    local_copy: str
    """Local copy that the error suggests where the hub can't be reached."""
    config: str | None = None
    file: str | None = None
    """File of the repository to read, such as one shard of C4; None: the whole split."""
    revision: str | None = None
    field: str = "text"

    @property
    def identity(self) -> dict[str, str | None]:
        """Return the names that decide which rows these are; cached tokens are found by them, offline."""
        return {name: value for name, value in asdict(self).items() if name != "local_copy"}

    def load(self, key: str) -> Sequence[str]:
        """Return the rows' texts, read as they are asked for. Raises UserError where they can't be had."""
        # a hub that can't be reached is tried for half a minute
        log.warning("%s: asking the Hugging Face hub for %s", key, self.repository)
        import datasets  # noqa: PLC0415 - 1 s, and not needed once the tokens are cached

        try:
            rows = datasets.load_dataset(
                self.repository,
                self.config,
                data_files=None if self.file is None else {self.split: self.file},
                split=self.split,
                revision=self.revision,
            )
            texts: Sequence[str] = rows[self.field]
        except Exception as error:  # no network, moved, gated, disk full: the remedy is the same
            reason = first_line(error)
            raise UserError(
                f"{key}: cannot load {self.repository} from the Hugging Face hub ({reason}); give "
                f"the path of a local copy instead: {self.local_copy}"
            ) from error
        return texts


def _c4(split: str, file: str) -> HubRows:
    return HubRows("allenai/c4", split, file, file=f"en/{file}")


def _known(split: str, c4: HubRows, c4_rows: Protocol) -> dict[str, tuple[HubRows, Protocol]]:
    """Return the texts that have names, with what becomes of their rows; ``split`` is of all but C4."""
    # not a .jsonl: for calibration each of its rows would be a document
    joined, local = f"a .txt with the {split} split's rows joined by blank lines", f"ptb.{split}.txt"
    wikitext2 = HubRows("Salesforce/wikitext", split, joined, config="wikitext-2-raw-v1")
    # the data set itself is a script, which `datasets` runs no longer; the hub's conversion
    file, revision = f"penn_treebank/{split}/0000.parquet", "refs/convert/parquet"
    ptb = HubRows("ptb-text-only/ptb_text_only", split, local, None, file, revision, field="sentence")
    return {"c4": (c4, c4_rows), "wikitext2": (wikitext2, PARAGRAPHS), "ptb": (ptb, SENTENCES)}


CALIBRATION = _known("train", _c4("train", "c4-train.00000-of-01024.json.gz"), AS_THEY_ARE)
EVALUATION = _known("test", _c4("validation", "c4-validation.00000-of-00008.json.gz"), C4_EVALUATION)
KNOWN = {CALIBRATION_KEY: (CALIBRATION, "calibration.txt"), EVALUATION_KEY: (EVALUATION, "heldout.txt")}
"""Texts that have names, and the file of the embedded one, by the key that chooses one."""


def is_file(source: str) -> bool:
    """Tell whether a text is a local file, and not one that has a name of its own."""
    return source != "embedded" and source not in EVALUATION


def are_names(given: Any) -> bool:
    """Tell whether texts are given by their names or files: one, a list of them, or proportions."""

    def is_name(item: Any) -> bool:
        if not isinstance(item, str):
            return isinstance(item, Path)
        if os.path.isfile(item):  # noqa: PTH113  (a text may be too long for a Path)
            return True
        return len(item.encode(errors="replace")) <= LONGEST_NAME and NAME.fullmatch(item) is not None

    if isinstance(given, list | tuple):
        return all(map(is_name, given))
    return isinstance(given, str | Path | Mapping)


def short_names(sources: Sequence[str]) -> dict[str, str]:
    """Return the name of each text in tables: of a file its own, without folders, if no other text has it."""
    short = {s: Path(s).name if is_file(s) else s for s in sources}
    taken = [name for name in short.values() if is_file(name)]
    return {s: name if taken.count(name) == 1 else s for s, name in short.items()}


def seen_texts(calibration: str | Mapping[str, float], evaluation: Sequence[str]) -> list[str]:
    """Return the files of ``evaluation`` that have the same content as one of ``calibration``."""
    given = [calibration] if isinstance(calibration, str) else calibration
    seen = {checksum(expanded(source)) for source in given if is_file(source)}
    return [text for text in evaluation if seen and is_file(text) and checksum(expanded(text)) in seen]


def find_text(source: str, key: str) -> Text:
    """Return a text of ``key``, which names what segments are drawn from or perplexity is measured on.

    For calibration every row of a .json or .jsonl is a document, any other file is one. For evaluation such
    rows are joined by blank lines, as WikiText-2's are, and other files unchanged; local copies of PTB and of
    C4's validation shards are known by their names. Raises UserError where the source is neither a known name
    nor a file that can be read.
    """

    def text(content: object, protocol: Protocol, rows: Callable[[], Sequence[Document]]) -> Text:
        identity = {"content": content, "protocol": asdict(protocol)}
        return Text(source, identity, protocol, lambda: protocol.documents(rows()))

    known, embedded = KNOWN[key]
    if source == "embedded":
        raw = (EMBEDDED / embedded).read_bytes()
        return text({"sha256": hashlib.sha256(raw).hexdigest()}, AS_THEY_ARE, lambda: [raw.decode()])
    if source in known:
        hub, protocol = known[source]
        return text(hub.identity, protocol, lambda: hub.load(key))
    file = TextFile.find(source, key, conversations=key == CALIBRATION_KEY)
    content = {"format": "json" if file.is_json else "text", "sha256": file.checksum()}
    protocol = C4_EVALUATION if file.name.startswith("c4-validation.") else PARAGRAPHS
    if file.name in SENTENCE_FILES:
        protocol = SENTENCES
    elif key == CALIBRATION_KEY or not file.is_json:
        protocol = AS_THEY_ARE
    return text(content, protocol, file.rows)
