"""Tell which tokenizers llama.cpp has, and what it calls their rules.

llama.cpp splits text by rules that it knows by name; a tokenizer whose rules have no name there is
refused, because another rule would split some texts differently without a word.
"""

import json
from pathlib import Path
from typing import Any

from aespa_pl.errors import UserError

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CONTRACTIONS = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_CASES_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LINES = r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = r"| ?[^\s\p{L}\p{N}]+" + _LINES
_THREE_STEPS = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",  # Chinese and Japanese
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
SPLITS = {
    _CONTRACTIONS + r"\p{N}{1,3}" + _REST: "llama-bpe",
    _CONTRACTIONS + r"\p{N}" + _REST: "qwen2",
    _ENDINGS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+" + _LINES: "qwen35",
    "|".join(word + _ENDINGS + "?" for word in _WORDS) + r"|\p{N}{1,3}" + _CASES_REST: "gpt-4o",
    "|".join(_WORDS) + r"|\p{N}" + _CASES_REST: "tekken",
    _CONTRACTIONS + r"\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+": "seed-coder",
    r" ?[^(\s|[.,!?…。，、।۔،])]+": "bloom",  # noqa: RUF001 - its punctuation
    "\n".join(_THREE_STEPS): "deepseek-v3",
}
"""llama.cpp's name of a rule, by the regular expressions in tokenizer.json, one on a line."""
WHOLE_WORDS = {"llama-bpe": "smaug-bpe", "tekken": None}
"""Rules by which llama.cpp takes a whole word that is a token before it merges; and what it calls the same
split without that."""
SPACE = "\u2581"
"""What stands for a space in the tokens of SentencePiece."""
BLANK = {"String": " "}
"""The pattern of a step that is about spaces."""


def unsupported_tokenizer(folder: Path) -> str | None:
    """Return which part of a model's tokenizer llama.cpp does not have; None: it has all.

    Raises UserError where tokenizer.json can't be read.
    """
    content = read_tokenizer(folder)
    kind, path = content["model"].get("type"), folder / "tokenizer.json"
    if kind != "BPE":
        return f"{path} is a tokenizer of the type {kind}, only BPE is supported"
    if not content["model"].get("byte_fallback"):
        return _unsupported_bytes(content, path)
    return _unsupported_pieces(content, path)


def lacking_tokenizer(folder: Path) -> str | None:
    """Return which part of a model's tokenizer llama.cpp does not have; None: nothing.

    A folder may have none yet: it is wanted when the run is exported.
    """
    return unsupported_tokenizer(folder) if (folder / "tokenizer.json").is_file() else None


def _unsupported_bytes(content: dict[str, Any], path: Path) -> str | None:
    rules = _steps(content, "pre_tokenizer", "pretokenizers")
    if splitting_rule(content) is None:
        kinds = ", ".join(str(step["type"]) for step in rules) or "not at all"
        return f"llama.cpp has no name for how {path} splits text ({kinds})"
    changes = {step["type"] for step in _steps(content, "normalizer", "normalizers")} - {"NFC"}
    if any(step.get("add_prefix_space") for step in rules):
        changes.add("add_prefix_space")
    if changes:
        return f"llama.cpp does not change a text as {path} does ({', '.join(sorted(changes))})"
    return None


def _unsupported_pieces(content: dict[str, Any], path: Path) -> str | None:
    steps = steps_before_merges(content)
    replaced = any(step["type"] in ("Replace", "Metaspace") and _is_of_pieces(step) for step in steps)
    # a split at spaces finds none where all are replaced
    others = [s for s in steps if not (s["type"] == "Split" and s["pattern"] == BLANK)] if replaced else steps
    unknown = {step["type"] for step in others if not _is_of_pieces(step)}
    # a token with a space behind its start is never found where a text is split at spaces before
    if any(SPACE in token[1:] for token in content["model"]["vocab"]):
        unknown |= {
            "Metaspace with split" for s in steps if s["type"] == "Metaspace" and s.get("split", True)
        }
    if unknown or not replaced:
        what = ", ".join(sorted(unknown)) or "spaces stay"
        return f"llama.cpp's SentencePiece does not change or split text as {path} does ({what})"
    return None


def _is_of_pieces(step: dict[str, Any]) -> bool:
    """Return whether SentencePiece has a step: spaces become their sign, and one may come before a text."""
    if step["type"] == "Replace":
        return bool(step["pattern"] == BLANK and step["content"] == SPACE)
    if step["type"] == "Metaspace":
        return bool(step["replacement"] == SPACE)
    return bool(step["type"] == "Prepend" and step["prepend"] == SPACE)


def steps_before_merges(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the steps that come before a tokenizer's merges."""
    before = _steps(content, "normalizer", "normalizers")
    return [*before, *_steps(content, "pre_tokenizer", "pretokenizers")]


def adds_spaces(folder: Path) -> bool:
    """Return whether llama.cpp puts spaces behind added tokens (``[INST] Hi``) that the tokenizer does not.

    A GGUF file says whether a space comes before a text, and llama.cpp begins one behind each added token.
    """
    steps = steps_before_merges(read_tokenizer(folder))
    return any(s["type"] == "Metaspace" and s.get("prepend_scheme") != "never" for s in steps)


def splitting_rule(content: dict[str, Any]) -> str | None:
    """Return llama.cpp's name of how a tokenizer of bytes splits text; None: it has none."""
    steps = _steps(content, "pre_tokenizer", "pretokenizers")
    kinds, again = [step.get("type") for step in steps], bool(steps and steps[-1].get("use_regex", True))
    if kinds == ["ByteLevel"] and again:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"] and again:
        return "smollm"
    *splits, last = kinds or [""]
    # otherwise ByteLevel splits the pieces once more
    if splits and {*splits} == {"Split"} and last == "ByteLevel" and not again:
        # in some files with the characters \r and \n themselves
        patterns = (step["pattern"].get("Regex", "") for step in steps[:-1])
        rule = SPLITS.get("\n".join(p.replace("\r", r"\r").replace("\n", r"\n") for p in patterns))
        whole = content["model"].get("ignore_merges", False)
        return rule if whole or rule not in WHOLE_WORDS else WHOLE_WORDS[rule]
    return None


def _steps(content: dict[str, Any], part: str, inner: str) -> list[dict[str, Any]]:
    """Return the steps of a part of a tokenizer, which is one step, several ``inner`` ones, or missing."""
    stated = content.get(part) or {inner: []}
    steps: list[dict[str, Any]] = stated.get(inner, [stated])
    return steps


def read_tokenizer(folder: Path) -> dict[str, Any]:
    """Return the content of tokenizer.json. Raises UserError where it can't be read."""
    path, content, cause = folder / "tokenizer.json", None, None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        cause = error
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise UserError(
            f"a GGUF file has the tokenizer, but {path} cannot be read: make it with "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        ) from cause
    return content
