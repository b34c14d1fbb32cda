"""Texts as segments of token ids, as in the paper (Section 4.1, following OPTQ).

Special tokens are added as the tokenizer does by default: once, around a whole document.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from aespa_pl.data.texts import CALIBRATION_KEY, EVALUATION_KEY, calibration_text, evaluation_text
from aespa_pl.data.token_cache import TokenCache
from aespa_pl.errors import UserError
from aespa_pl.settings import CalibrationSettings

log = logging.getLogger(__name__)

PATIENCE = 50_000
"""Documents in a row that may be too short before the text is given up: half a minute. In C4 one in
some thirty has more than 2,048 tokens."""

Tokenize = Callable[[str], Int64[Tensor, " tokens"]]


def calibration_tokens(
    settings: CalibrationSettings,
    tokenizer: PreTrainedTokenizerBase,
    segment_length: int,
    cache: Path,
) -> Int64[Tensor, "segments length"]:
    """Return random segments of the calibration text: the same ones for the same seed.

    Args:
        settings: Text, number of segments and seed; its ``segment_length`` is not read.
        tokenizer: The model's.
        segment_length: Tokens in a segment.
        cache: Folder for tokens.

    Raises:
        UserError: The text can't be had, or is too short.
    """
    text = calibration_text(settings.source)
    made_from = {
        "kind": "calibration",
        "text": text.identity,
        "tokenizer": tokenizer_identity(tokenizer),
        "segments": settings.segments,
        "segment_length": segment_length,
        "seed": settings.seed,
    }

    def make() -> Tensor:
        log.info("tokenizing %s for calibration", text.source)
        return draw_segments(
            text.documents(),
            lambda document: tokenize(tokenizer, document),
            settings,
            segment_length,
        )

    return TokenCache(cache).get(made_from, make)


def evaluation_tokens(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    segment_length: int,
    max_segments: int | None,
    cache: Path,
) -> Int64[Tensor, "segments length"]:
    """Return a text, tokenized as one string, in whole segments; what is left at its end is dropped.

    Args:
        source: One of ``EvaluationSettings.texts``.
        tokenizer: The model's.
        segment_length: Tokens in a segment.
        max_segments: Only the first so many; None: all of them, of C4 the paper's 256.
        cache: Folder for tokens.

    Raises:
        UserError: The text can't be had, or has fewer tokens than a segment.
    """
    text = evaluation_text(source)
    limit = max_segments or text.protocol.max_segments
    made_from = {
        "kind": "evaluation",
        "text": text.identity,
        "tokenizer": tokenizer_identity(tokenizer),
        "segments": limit,
        "segment_length": segment_length,
    }

    def make() -> Tensor:
        log.info("tokenizing %s for evaluation", source)
        (document,) = text.documents()
        tokens = tokenize(tokenizer, document)
        if len(tokens) < segment_length:
            raise UserError(
                f"{EVALUATION_KEY}: {source} has {len(tokens)} tokens, a segment has "
                f"{segment_length}; choose a shorter data.evaluation.segment_length, or a longer "
                "text"
            )
        whole = len(tokens) // segment_length * segment_length
        return tokens[:whole].unflatten(0, (-1, segment_length))[:limit]  # [segments, length]

    return TokenCache(cache).get(made_from, make)


def check_vocabulary(tokens: Int64[Tensor, "segments length"], vocabulary_size: int) -> None:
    """Make sure that the model has an embedding for every token.

    Raises:
        UserError: It does not: tokenizer and model don't belong together.
    """
    highest = int(tokens.max())
    if highest >= vocabulary_size:
        raise UserError(
            f"model.pretrained: the tokenizer gives token id {highest}, but the model's vocabulary "
            f"has {vocabulary_size} entries; use the tokenizer that belongs to the model"
        )


def draw_segments(
    documents: Sequence[str], tokenize: Tokenize, settings: CalibrationSettings, length: int
) -> Int64[Tensor, "segments length"]:
    """Return random windows of random documents that have more than ``length`` tokens.

    Each document is used once. If they don't suffice, the other windows are drawn from the same
    documents, a longer one more often.

    Raises:
        UserError: No document is long enough, or all that are have fewer tokens than are asked for.
    """
    random = Random(settings.seed)
    long: list[Tensor] = []
    seen = longest = short_in_a_row = 0
    for index in random.sample(range(len(documents)), len(documents)):
        tokens = tokenize(documents[index])
        seen, longest = seen + 1, max(longest, len(tokens))
        if len(tokens) > length:
            long.append(tokens)
        short_in_a_row = 0 if len(tokens) > length else short_in_a_row + 1
        if len(long) == settings.segments or short_in_a_row == PATIENCE:
            break
    if not long:
        raise UserError(
            f"{CALIBRATION_KEY}: {settings.source} has no document of more than {length} tokens "
            f"(documents read: {seen}, the longest has {longest} tokens); choose a shorter "
            "data.calibration.segment_length, or another text"
        )
    _refuse_short_text(sum(map(len, long)), settings, length)
    missing = settings.segments - len(long)
    chosen = long + random.choices(long, [len(tokens) - length for tokens in long], k=missing)
    starts = [random.randint(0, len(tokens) - length) for tokens in chosen]
    return torch.stack([t[i : i + length] for t, i in zip(chosen, starts, strict=True)])


def _refuse_short_text(available: int, settings: CalibrationSettings, length: int) -> None:
    needed = settings.segments * length
    if available < needed:
        raise UserError(
            f"{CALIBRATION_KEY}: {settings.source} is too short: {settings.segments} segments of "
            f"{length} tokens need {needed} tokens, its documents of more than {length} tokens "
            f"have {available} together; ask for at most {available // length} "
            "data.calibration.segments, for a shorter data.calibration.segment_length, or name "
            "another text"
        )


def tokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> Int64[Tensor, " tokens"]:
    """Return the token ids of a text of any length."""
    # verbose=False: no warning that the text is longer than the model's positions
    encoding = tokenizer(text, return_attention_mask=False, verbose=False)
    return torch.tensor(encoding["input_ids"], dtype=torch.int64)


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a checksum of all that decides which tokens a text has."""
    if tokenizer.is_fast:
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        # state of the last call, not of the tokenizer
        del content["truncation"], content["padding"]
    else:
        content = [
            type(tokenizer).__name__,
            tokenizer.name_or_path,
            tokenizer.get_vocab(),
            tokenizer("a")["input_ids"],  # shows which special tokens are added
        ]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
