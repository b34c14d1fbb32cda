"""Draw calibration segments at random.

Source: Section 4.1 of the paper, which follows OPTQ: random windows of random documents that are
longer than a segment. Only documents that are drawn are tokenized, because a shard of C4 has 356,317.
"""

from collections.abc import Callable, Sequence
from random import Random

import torch
from jaxtyping import Int64
from torch import Tensor

from aespa_pl.data.texts import CALIBRATION_KEY
from aespa_pl.errors import UserError
from aespa_pl.settings import CalibrationSettings

PATIENCE = 50_000
"""Documents in a row that may be too short before a text is given up: a minute of tokenizing."""

Tokenize = Callable[[str], Int64[Tensor, " tokens"]]


def draw_segments(
    documents: Sequence[str], tokenize: Tokenize, settings: CalibrationSettings, length: int
) -> Int64[Tensor, "segments length"]:
    """Return random windows of random documents that have more than ``length`` tokens.

    A document is used once while others are left. After that windows are drawn from all of them, so
    that every window is equally likely. With ``settings.pack`` shorter documents are joined, in the
    order in which they are drawn, and count as one as soon as they are long enough together.

    Args:
        documents: The calibration text; an item is read when it is asked for.
        tokenize: Makes token ids of a document.
        settings: Number of segments, seed and packing; the text's name, for messages.
        length: Tokens in a segment.

    Raises:
        UserError: No document is long enough, or all that are have fewer tokens than are asked for.
    """
    random = Random(settings.seed)  # noqa: S311 - no secret
    drawn = _draw_documents(documents, tokenize, settings, length, random)
    _refuse_short_text(sum(map(len, drawn)), settings, length)
    windows = [len(tokens) - length + 1 for tokens in drawn]
    drawn += random.choices(drawn, windows, k=settings.segments - len(drawn))
    starts = [random.randint(0, len(tokens) - length) for tokens in drawn]
    return torch.stack([t[i : i + length] for t, i in zip(drawn, starts, strict=True)])


def _draw_documents(
    documents: Sequence[str],
    tokenize: Tokenize,
    settings: CalibrationSettings,
    length: int,
    random: Random,
) -> list[Tensor]:
    """Return the tokens of long enough documents: one for each segment, or as many as there are."""
    long: list[Tensor] = []
    packed: list[Tensor] = []
    read = longest = short_in_a_row = 0
    for index in random.sample(range(len(documents)), len(documents)):
        tokens = tokenize(documents[index])
        read, longest = read + 1, max(longest, len(tokens))
        if settings.pack and len(tokens) <= length:
            packed.append(tokens)
            if sum(map(len, packed)) > length:
                tokens, packed = torch.cat(packed), []
        if len(tokens) > length:
            long.append(tokens)
            short_in_a_row = 0
        else:
            short_in_a_row += 1
        if len(long) == settings.segments or short_in_a_row == PATIENCE:
            break
    if not long:
        raise UserError(
            f"{CALIBRATION_KEY}: {settings.source} has no document of more than {length} tokens "
            f"(documents read: {read}, the longest has {longest} tokens); "
            f"{'' if settings.pack else 'join documents with data.calibration.pack true, '}choose a "
            "shorter data.calibration.segment_length, or another text (a .txt is one document)"
        )
    return long


def _refuse_short_text(available: int, settings: CalibrationSettings, length: int) -> None:
    needed = settings.segments * length
    if available < needed:
        raise UserError(
            f"{CALIBRATION_KEY}: {settings.source} is too short: {settings.segments} segments of "
            f"{length} tokens need {needed} tokens, its documents of more than {length} tokens "
            f"have {available} together; set data.calibration.segments to {available // length} at "
            "most, choose a shorter data.calibration.segment_length, or another text"
        )
