"""Cut texts into segments of token ids, as in the paper (Section 4.1, following OPTQ).

Special tokens are added as the tokenizer does by default: once, around a whole document.
"""

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Int64
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from aespa_pl.data.files import Document
from aespa_pl.data.sampling import divide_segments, draw_segments
from aespa_pl.data.texts import CALIBRATION_KEY, EVALUATION_KEY, find_text
from aespa_pl.errors import UserError, first_line
from aespa_pl.paths import expanded
from aespa_pl.settings import CalibrationSettings
from aespa_pl.storage.cache import keep, recalled
from aespa_pl.storage.files import checksum

log = logging.getLogger(__name__)

TENSOR = "tokens"
"""Name of the tensor in a file of token ids, and of the folder in the cache."""
VERSION = 4
"""Number of the way in which tokens are made; a change of it makes older entries of the cache invisible."""
TOKENS_PER_INPUT = 10
"""Calibration tokens for each input of a projection below which they are called few. OPTQ's INT2 perplexity
on embedded:llama is 31.0 with 12 of them and with 23, 31.6 with 6, 34.0 with 3."""
DATE = "26 Jul 2024"
"""Date for chat templates, which would write today's: tokens then change daily. Llama 3's read it."""
CLOCK = f"{{% macro strftime_now(format) %}}{DATE}{{% endmacro %}}"
"""Beginning of a chat template that gives the date to those that ask for the time."""


def calibration_tokens(
    settings: CalibrationSettings,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    cache: Path,
    *,
    bos: int | None = None,
) -> Int64[Tensor, "segments length"]:
    """Return random segments of the calibration text: the same ones for the same seed.

    Those of several texts are mixed, so that each of them is also held back by a tuning. ``length`` counts,
    not the settings' own; the folder ``cache`` keeps the tokens. ``bos`` takes the place of each
    segment's first token; those of a file of token ids stay as the user made them. Raises UserError for a
    text that can't be had or is too short, and for two with the same content.
    """
    if isinstance(settings.source, Mapping):
        counts = divide_segments(settings.source, settings.segments)
        _refuse_equal(counts)
        parts = (replace(settings, source=name, segments=count) for name, count in counts.items())
        segments = torch.cat([calibration_tokens(part, tokenizer, length, cache, bos=bos) for part in parts])
        generator = torch.Generator().manual_seed(settings.seed)
        return segments[torch.randperm(len(segments), generator=generator)]
    if settings.source.endswith(".safetensors"):
        return _stored(settings.source, CALIBRATION_KEY, length, settings.segments, settings.seed)
    text = find_text(settings.source, CALIBRATION_KEY)
    made_from = {
        "kind": "calibration",
        "text": text.identity,
        "tokenizer": tokenizer_identity(tokenizer),
        "chat_template": tokenizer.chat_template,
        "special_tokens": tokenizer.special_tokens_map,  # a template writes them
        "segments": settings.segments,
        "pack": settings.pack,
        "segment_length": length,
        "seed": settings.seed,
    }

    def make() -> Tensor:
        log.info("tokenizing %s for calibration", text.source)
        tokenized = partial(_document_tokens, tokenizer, text.source)
        return draw_segments(text.documents(), tokenized, settings, length)

    return _begun(cached_tokens(cache, made_from, make), bos)


def _refuse_equal(sources: Iterable[str]) -> None:
    """Raise UserError where two texts are one under two names, whose segments would be the same."""
    seen: dict[str, str] = {}
    for source in sources:
        if source.endswith(".safetensors"):
            try:
                identity = checksum(expanded(source))
            except OSError:  # refused when it is read
                continue
        else:
            identity = json.dumps(find_text(source, CALIBRATION_KEY).identity, sort_keys=True)
        if (other := seen.setdefault(identity, source)) != source:
            raise UserError(
                f"{CALIBRATION_KEY}: {other} and {source} have the same content, and would give the same "
                "segments: leave one of them out, and give the other the proportions of both"
            )


def evaluation_tokens(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    max_segments: int | None,
    cache: Path,
    *,
    bos: int | None = None,
) -> Int64[Tensor, "segments length"]:
    """Return a text, tokenized as one string and cut into whole segments; the rest is dropped.

    The first ``max_segments`` are kept (None: all, of C4 the paper's 256); ``cache`` and ``bos`` are as
    above. Raises UserError where the text can't be had, or has fewer tokens than a segment.
    """
    if source.endswith(".safetensors"):
        return _stored(source, EVALUATION_KEY, length, max_segments)
    text = find_text(source, EVALUATION_KEY)
    limit = max_segments or text.protocol.max_segments
    made_from = {
        "kind": "evaluation",
        "text": text.identity,
        "tokenizer": tokenizer_identity(tokenizer),
        "segments": limit,
        "segment_length": length,
    }

    def make() -> Tensor:
        log.info("tokenizing %s for evaluation", source)
        (document,) = text.documents()
        tokens = tokenize(tokenizer, str(document))
        if len(tokens) < length:
            raise UserError(
                f"{EVALUATION_KEY}: {source} has {len(tokens)} tokens, a segment has {length}; "
                "choose a shorter data.evaluation.segment_length, or a longer text"
            )
        return tokens[: len(tokens) // length * length].view(-1, length)[:limit]  # [segments, length]

    return _begun(cached_tokens(cache, made_from, make), bos)


def _begun(tokens: Int64[Tensor, "segments length"], bos: int | None) -> Int64[Tensor, "segments length"]:
    """Return segments that begin with ``bos`` in place of their first token, which is not measured anyway."""
    if bos is None:
        return tokens
    tokens = tokens.clone()
    tokens[:, 0] = bos
    return tokens


def _stored(
    source: str, key: str, length: int, limit: int | None, seed: int = 0
) -> Int64[Tensor, "segments length"]:
    """Return segments of a file of token ids, up to ``limit`` (None: all); ``key`` names it.

    Those are the first ones with seed 0, and with another one they are drawn from all.
    """
    path = expanded(source)
    try:
        with safe_open(path, "pt") as file:
            tokens: Tensor = file.get_tensor(TENSOR)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{key}: {source} can't be read ({error}): give a .safetensors file with the token ids of "
            f"segments, named {TENSOR}"
        ) from error
    numbers = tokens.is_floating_point() or tokens.is_complex()
    if tokens.dim() != 2 or numbers or tokens.shape[1] != length:
        raise UserError(
            f"{key}: {source} has {tokens.dtype} {[*tokens.shape]}: expected integers [segments, {length}], "
            f"because segment_length is {length}"
        )
    if len(tokens) < (limit if limit and key == CALIBRATION_KEY else 1):
        raise UserError(
            f"{key}: {source} has {len(tokens)} segments: set the number of segments to {len(tokens)} or less"
        )
    if seed and limit:
        tokens = tokens[torch.randperm(len(tokens), generator=torch.Generator().manual_seed(seed))]
    tokens = tokens[:limit].to(torch.int64)  # torch has no minimum of unsigned ones
    if int(tokens.min()) < 0:
        raise UserError(f"{key}: {source} has a token id below 0: ids begin at 0")
    return tokens


def few_tokens(segments: int, length: int, inputs: int) -> str | None:
    """Return a warning where statistics of so many inputs want more tokens; None where there are enough."""
    if segments * length >= TOKENS_PER_INPUT * inputs:
        return None
    wanted = math.ceil(TOKENS_PER_INPUT * inputs / length)
    return (
        f"{segments * length} calibration tokens are few for projections with up to {inputs} inputs: as a "
        f"rule of thumb, {TOKENS_PER_INPUT} tokens for each input or more give good statistics. Raise "
        f"data.calibration.segments to {wanted}"
    )


def cached_tokens(cache: Path, made_from: Mapping[str, object], make: Callable[[], Tensor]) -> Tensor:
    """Return the tokens made from ``made_from`` (JSON), from the cache (``data.cache``) if they are there."""
    described = {"version": VERSION, **made_from}
    if (tokens := recalled(cache, TENSOR, described)) is None:
        tokens = make()
        keep(cache, TENSOR, described, tokens)
    return tokens


def check_vocabulary(tokens: Int64[Tensor, "segments length"], vocabulary_size: int) -> None:
    """Raise UserError if the model lacks an embedding for a token: tokenizer and model don't fit."""
    if (highest := int(tokens.max())) >= vocabulary_size:
        raise UserError(
            f"model.pretrained: the texts have token id {highest}, but the model's vocabulary has "
            f"{vocabulary_size} entries: use the model's own tokenizer, or token ids that it made"
        )


def _document_tokens(
    tokenizer: PreTrainedTokenizerBase, source: str, document: Document
) -> Int64[Tensor, " tokens"]:
    """Return the token ids of a text, or of a conversation by the tokenizer's chat template."""
    if isinstance(document, str):
        return tokenize(tokenizer, document)
    if not tokenizer.chat_template:
        raise UserError(
            f"{CALIBRATION_KEY}: {source} has conversations ('messages'), and the tokenizer of this model "
            "has no chat template: give rows with 'text', or choose an instruct model"
        )
    # the library runs the template, which comes with the model, in jinja2's sandbox
    render = partial(tokenizer.apply_chat_template, tools=document.tools, tokenize=False, date_string=DATE)
    messages = document.messages
    try:
        template = CLOCK + tokenizer.get_chat_template(tools=document.tools)
        text = render(messages, chat_template=template)
        contents = [content for message in messages if (content := message["content"].strip())]
        if contents and not any(content in text for content in contents):
            # the templates of some multimodal models read parts alone
            messages = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages]
            text = render(messages, chat_template=template)
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    except Exception as error:  # what it raises is up to the template
        reason = first_line(error)
        raise UserError(
            f"{CALIBRATION_KEY}: the model's chat template refuses a conversation of {source} ({reason}): "
            "remove such conversations, or give rows with 'text'"
        ) from error
    return torch.tensor(ids, dtype=torch.int64)


def tokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> Int64[Tensor, " tokens"]:
    """Return the token ids of a text of any length."""
    # verbose=False: no warning that the text is longer than the model's positions
    ids = tokenizer(text, return_attention_mask=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.int64)


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
