"""Write the tokenizer of a model in the words of GGUF.

llama.cpp splits text by rules that it knows by name; a tokenizer whose rules have no name there is
refused, because another rule would split some texts differently without a word.
"""

import json
import re
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, SpecialVocab, TokenType

from aespa_pl.errors import UserError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    _CONTRACTIONS + r"\p{N}{1,3}" + _REST: "llama-bpe",
    _CONTRACTIONS + r"\p{N}" + _REST: "qwen2",
    r" ?[^(\s|[.,!?…。，、।۔،])]+": "bloom",  # noqa: RUF001 - its punctuation
}
"""llama.cpp's name of a rule, by the regular expression in tokenizer.json."""

SENTENCEPIECE_STEPS = {"Prepend", "Replace", "Metaspace"}
"""Types of the steps that a tokenizer with SentencePiece's pieces takes before it merges: all concern
spaces."""


def add_vocabulary(writer: GGUFWriter, folder: Path, size: int) -> None:
    """Write tokens, merges, special tokens and chat template.

    Raises UserError where llama.cpp has no tokenizer like it.
    """
    content = _tokenizer(folder)
    kind = content["model"]
    vocabulary = {**kind["vocab"], **{t["content"]: t["id"] for t in content["added_tokens"]}}
    types = {
        t["content"]: TokenType.CONTROL if t["special"] else TokenType.USER_DEFINED
        for t in content["added_tokens"]
    }
    texts = {number: text for text, number in vocabulary.items()}
    tokens = [texts.get(i, f"[PAD{i}]") for i in range(size)]
    if kind.get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(_scores(kind["merges"], tokens))
        writer.add_add_space_prefix(_puts_space_first(content))
        types = {**{t: TokenType.BYTE for t in tokens if re.fullmatch("<0x..>", t)}, **types}
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(splitting_rule(content, folder))
    writer.add_token_list(tokens)
    writer.add_token_types(
        [
            types.get(token, TokenType.NORMAL) if i in texts else TokenType.UNUSED
            for i, token in enumerate(tokens)
        ]
    )
    SpecialVocab(folder, load_merges=not kind.get("byte_fallback"), n_vocab=size).add_to_gguf(
        writer, quiet=True
    )


def refuse_tokenizer(folder: Path) -> None:
    """Raise UserError if llama.cpp has no tokenizer like the model's."""
    content = _tokenizer(folder)
    if not content["model"].get("byte_fallback"):
        splitting_rule(content, folder)
    elif unknown := {step["type"] for step in _steps(content)} - SENTENCEPIECE_STEPS:
        raise UserError(
            f"--format gguf: llama.cpp's SentencePiece does not change or split text as "
            f"{folder / 'tokenizer.json'} does ({', '.join(sorted(unknown))}): use --format "
            "compressed-tensors"
        )


def _steps(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the steps that come before a tokenizer's merges."""
    steps: list[dict[str, Any]] = []
    for part, inner in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")):
        stated = content[part] or {inner: []}
        steps += stated.get(inner, [stated])
    return steps


def _puts_space_first(content: dict[str, Any]) -> bool:
    """Return whether a text is split as if a space came before it."""
    return any(
        step["type"] == "Prepend" or step.get("prepend_scheme", "never") != "never"
        for step in _steps(content)
    )


def splitting_rule(content: dict[str, Any], folder: Path) -> str:
    """Return llama.cpp's name of how a tokenizer of bytes splits text before it merges.

    Raises UserError where it has none.
    """
    stated = content["pre_tokenizer"] or {}
    steps = stated.get("pretokenizers", [stated])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"]:
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and (
        rule := SPLITS.get(steps[0]["pattern"].get("Regex", ""))
    ):
        return rule
    raise UserError(
        f"--format gguf: llama.cpp has no name for how {folder / 'tokenizer.json'} splits text "
        f"({', '.join(map(str, kinds))}): use --format compressed-tensors"
    )


def _tokenizer(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer.json"
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"--format gguf reads tokenizer.json, but {path} cannot be read: make it with "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        ) from error
    if content["model"]["type"] != "BPE":
        raise UserError(
            f"--format gguf: {path} is a tokenizer of the type {content['model']['type']}, only BPE is "
            "supported: use --format compressed-tensors"
        )
    return content


def _scores(merges: list[Any], tokens: list[str]) -> list[float]:
    """Return scores by which llama.cpp's SentencePiece merges in the order of the merges.

    It joins the pair whose result has the highest score, the leftmost first.
    """
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        ranks.setdefault("".join(pair), rank)
    last = float(len(merges))
    return [-float(ranks[token]) if token in ranks else -last for token in tokens]
