"""Draw calibration segments: random windows of random documents that are longer than a segment.

Source: Section 4.1 of the paper. Only what is drawn is tokenized: a shard of C4 has 356,317 documents.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from random import Random

import torch
from jaxtyping import Int64
from torch import Tensor

from aespa_pl.data.files import Document
from aespa_pl.data.texts import CALIBRATION_KEY
from aespa_pl.errors import UserError
from aespa_pl.settings import CalibrationSettings

PATIENCE = 50_000
"""Documents in a row that may be too short before a text is given up: a minute of tokenizing."""

PACK = "join shorter documents with data.calibration.pack true, "
Tokenize = Callable[[Document], Int64[Tensor, " tokens"]]


def divide_segments(proportions: Mapping[str, float], segments: int) -> dict[str, int]:
    """Return the number of segments of each text, rounded. Raises UserError where a text would have none."""
    if not proportions:
        raise UserError(f"{CALIBRATION_KEY} names no text: expected such as '{{c4: 0.7, wikitext2: 0.3}}'")
    exact = {name: segments * p / sum(proportions.values()) for name, p in proportions.items()}
    counts = {name: int(number) for name, number in exact.items()}
    by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[: segments - sum(counts.values())]:
        counts[name] += 1
    if empty := [name for name, count in counts.items() if count == 0]:
        raise UserError(
            f"{CALIBRATION_KEY}: segments are too few ({segments}), and {', '.join(empty)} would have none: "
            "raise its proportion or data.calibration.segments, or leave it out"
        )
    return counts


def draw_segments(
    documents: Sequence[Document], tokenize: Tokenize, settings: CalibrationSettings, length: int
) -> Int64[Tensor, "segments length"]:
    """Return random windows of random documents that have more than ``length`` tokens.

    A document is used once while others are left; then windows are drawn from all of them. No two windows
    overlap, and of equal documents one counts, so that a tuning trains on no token of the segments that it
    holds back. With ``settings.pack`` shorter documents are joined, in the order in which they are drawn,
    until they are long enough together.

    Raises UserError where no document is long enough, or there is no room for so many windows.
    """
    random = Random(settings.seed)  # noqa: S311 - no secret
    drawn = _draw_documents(documents, tokenize, settings, length, random)
    lengths = [len(tokens) for tokens in drawn]
    room = sum(n // length for n in lengths)
    if room < settings.segments:
        advice = PACK if len(documents) > len(drawn) and not settings.pack else ""
        raise UserError(
            f"{CALIBRATION_KEY}: {settings.source} is too short: its documents of more than "
            f"{length} tokens have room for {room} segments that don't overlap, of {settings.segments} to be "
            f"drawn; set data.calibration.segments (or this text's part of them) to {room} at most, "
            f"{advice}choose a shorter data.calibration.segment_length, or another text"
        )
    chosen = [*range(len(drawn))]
    chosen += random.choices(chosen, [n - length + 1 for n in lengths], k=settings.segments - len(drawn))
    windows = [(i, random.randint(0, lengths[i] - length)) for i in chosen]
    if any(a == b and end - start < length for (a, start), (b, end) in pairwise(sorted(windows))):
        windows = _place_apart(lengths, settings.segments, length, random)
    return torch.stack([drawn[i][start : start + length] for i, start in windows])


def _place_apart(lengths: list[int], count: int, length: int, random: Random) -> list[tuple[int, int]]:
    """Return windows that don't overlap, in random order, of every document; all places are as likely."""
    rest = [i for i, n in enumerate(lengths) for _ in range(n // length - 1)]
    counts = Counter([*range(len(lengths)), *random.sample(rest, count - len(lengths))])
    windows = []
    for i, number in counts.items():
        # a window shrunk to one token leaves distinct places, each of which it may take
        places = random.sample(range(lengths[i] - number * (length - 1)), number)
        windows += [(i, place + n * (length - 1)) for n, place in enumerate(sorted(places))]
    random.shuffle(windows)
    return windows


def _draw_documents(
    texts: Sequence[Document], tokenize: Tokenize, settings: CalibrationSettings, length: int, random: Random
) -> list[Tensor]:
    """Return the tokens of long enough documents: one for each segment, or as many as there are."""
    long: list[Tensor] = []
    packed: list[Tensor] = []
    read: list[int] = []  # lengths of documents
    seen = set[bytes]()
    short_in_a_row = 0
    for index in random.sample(range(len(texts)), len(texts)):
        document = texts[index]
        if (content := hashlib.sha256(json.dumps(document, default=vars).encode()).digest()) in seen:
            continue
        seen.add(content)
        tokens = tokenize(document)
        read.append(len(tokens))
        if settings.pack and len(tokens) <= length:
            packed.append(tokens)
            if sum(map(len, packed)) > length:
                tokens, packed = torch.cat(packed), []
        short_in_a_row += 1
        if len(tokens) > length:
            long.append(tokens)
            short_in_a_row = 0
        if len(long) == settings.segments or short_in_a_row == PATIENCE:
            break
    if not long:
        what = f"document of more than {length} tokens"
        size, advice = f"the longest has {max(read, default=0)} tokens", PACK
        if settings.pack:
            what, size, advice = f"more than {length} tokens", f"{sum(read)} tokens together", ""
        raise UserError(
            f"{CALIBRATION_KEY}: {settings.source} has no {what} (documents read: {len(read)}, {size}); "
            f"{advice}choose a shorter data.calibration.segment_length, or another text (a .txt is one "
            "document)"
        )
    return long
