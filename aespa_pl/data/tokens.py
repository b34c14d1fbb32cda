"""Cut texts into segments of token ids, as in the paper (Section 4.1, following OPTQ).

Special tokens are added as the tokenizer does by default: once, around a whole document.
"""

import hashlib
import json
import logging
from pathlib import Path

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from aespa_pl.data.sampling import draw_segments
from aespa_pl.data.texts import EVALUATION_KEY, calibration_text, evaluation_text
from aespa_pl.data.token_cache import cached_tokens
from aespa_pl.errors import UserError
from aespa_pl.settings import CalibrationSettings

log = logging.getLogger(__name__)


def calibration_tokens(
    settings: CalibrationSettings,
    tokenizer: PreTrainedTokenizerBase,
    segment_length: int,
    cache: Path,
) -> Int64[Tensor, "segments length"]:
    """Return random segments of the calibration text: the same ones for the same seed.

    Args:
        settings: Text, number of segments and seed; its ``segment_length`` is not read.
        tokenizer: Tokenizer of the model.
        segment_length: Tokens in a segment.
        cache: Folder that keeps the tokens for later runs.

    Raises:
        UserError: The text can't be had, or is too short.
    """
    text = calibration_text(settings.source)
    made_from = {
        "kind": "calibration",
        "text": text.identity,
        "tokenizer": tokenizer_identity(tokenizer),
        "segments": settings.segments,
        "pack": settings.pack,
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

    return cached_tokens(cache, made_from, make)


def evaluation_tokens(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    segment_length: int,
    max_segments: int | None,
    cache: Path,
) -> Int64[Tensor, "segments length"]:
    """Return a text, tokenized as one string and cut into whole segments; the rest is dropped.

    Args:
        source: One of ``EvaluationSettings.texts``.
        tokenizer: Tokenizer of the model.
        segment_length: Tokens in a segment.
        max_segments: Number of segments that are kept, the first ones; None: all, of C4 the paper's 256.
        cache: Folder that keeps the tokens for later runs.

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
        return tokens[:whole].view(-1, segment_length)[:limit]  # [segments, length]

    return cached_tokens(cache, made_from, make)


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
