"""Write the tokenizer of a model in the words of GGUF.

The names of its rules are in ``models/llama_cpp_tokenizer.py``.
"""

import json
import logging
import re
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, SpecialVocab, TokenType
from transformers import PreTrainedTokenizerBase

from aespa_pl.models.llama_cpp_tokenizer import SPACE, read_tokenizer, splitting_rule, steps_before_merges

# it warns of templates for pairs of texts, which Gemma has, and which nothing here is made of
logging.getLogger("gguf.vocab").setLevel(logging.ERROR)

ENDS = ("eos", "eot", "eom")
"""llama.cpp's names of tokens that end a text."""
SHOWN = {
    "gemma4": (
        "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>",
        '<|"|>',
    )
}  # fmt: skip
"""Special tokens that llama.cpp looks for in a model's output, by architecture; it drops control tokens."""
NEVER = (TokenType.UNUSED, TokenType.CONTROL)
"""Types of tokens that no text has, the least likely in a model's output first."""


class _SpecialTokens(SpecialVocab):
    """Knows a model's special tokens; a number of -1 in config.json, which the library refuses, is none.

    The library reads one EOS; further tokens that end a text get the other names that llama.cpp has for such.
    """

    def __init__(self, folder: Path, size: int, *, load_merges: bool = False) -> None:
        super().__init__(folder, load_merges=load_merges, n_vocab=size)
        known = self.special_token_ids
        self.lost: list[int] = []
        """Ids that end a text, and that no name is left for."""
        for token in _end_tokens(folder):
            if not 0 <= token < size or token in map(known.get, ENDS):
                continue
            if (name := next((name for name in ENDS if name not in known), None)) is None:
                self.lost.append(token)
            else:
                known[name] = token

    def _set_special_token(self, typ: str, tid: Any) -> None:
        if not isinstance(tid, int) or tid >= 0:
            super()._set_special_token(typ, tid)

    def add_never(self, types: list[TokenType]) -> None:
        """Let a token that a model never means be the EOS, if there is none.

        llama.cpp would otherwise end a text at an ordinary token: the one with id 11, or 2 of SentencePiece.
        """
        unused, control = ([i for i, other in enumerate(types) if other == kind] for kind in NEVER)
        bos = self.special_token_ids.get("bos")
        candidates = [*unused, *([] if bos is None else [bos]), *control]
        if candidates:
            self.special_token_ids.setdefault("eos", candidates[0])


def _end_tokens(folder: Path) -> list[int]:
    """Return the ids that end a text in transformers, by generation_config.json, else by config.json."""
    for name in ("generation_config.json", "config.json"):
        try:
            stated = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError):  # transformers passes over such a file too
            continue
        if stated not in (None, []):
            return stated if isinstance(stated, list) else [stated]
    return []


def lost_end_tokens(folder: Path, size: int) -> list[int]:
    """Return the ids of tokens that end a text in transformers, and that a GGUF file has no name for."""
    return _SpecialTokens(folder, size).lost if len(_end_tokens(folder)) >= len(ENDS) else []


def unnamed_start(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the tokens that each text begins with, unless it is BOS alone: a GGUF file asks for no other."""
    ids, plain = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
    start = ids[: ids.index(plain[0])] if plain and plain[0] in ids else []
    return "" if start == [tokenizer.bos_token_id] else "".join(tokenizer.convert_ids_to_tokens(start))


def add_vocabulary(writer: GGUFWriter, folder: Path, size: int, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write tokens, merges, special tokens and template of a tokenizer that llama.cpp has.

    ``folder`` has its files, and ``tokenizer`` is what transformers makes of them.
    """
    content = read_tokenizer(folder)
    model = content["model"]
    added = {token["content"]: token for token in content.get("added_tokens", [])}
    vocabulary = {**model["vocab"], **{text: token["id"] for text, token in added.items()}}
    kinds = {True: TokenType.CONTROL, False: TokenType.USER_DEFINED}
    shown = SHOWN.get(writer.arch, ())
    types = {text: kinds[token["special"] and text not in shown] for text, token in added.items()}
    texts = {number: text for text, number in vocabulary.items()}
    tokens = [texts.get(i, f"[PAD{i}]") for i in range(size)]
    if model.get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(_scores(model["merges"], tokens))
        steps = steps_before_merges(content)  # some split a text as if a space came before it
        writer.add_add_space_prefix(any(map(_prepends_space, steps)))
        # in an added token that is written as it is, llama.cpp would not turn the sign back into a space
        types = {text: kind for text, kind in types.items() if added[text]["special"] or SPACE not in text}
        types = {**{t: TokenType.BYTE for t in tokens if re.fullmatch("<0x..>", t)}, **types}
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(str(splitting_rule(content)))
    writer.add_token_list(tokens)
    known = (types.get(token, TokenType.NORMAL) for token in tokens)
    of_rows = [kind if i in texts else TokenType.UNUSED for i, kind in enumerate(known)]
    writer.add_token_types(of_rows)
    special = _SpecialTokens(folder, size, load_merges=not model.get("byte_fallback"))
    special.add_never(of_rows)
    if isinstance(tokenizer.chat_template, str):  # of two files with one, the library takes the other
        special.chat_template = tokenizer.chat_template
    # of what a file does not say, llama.cpp decides by the name of the splitting rule
    ids = tokenizer("a")["input_ids"]
    special.add_special_token |= {
        "bos": ids[:1] == [tokenizer.bos_token_id], "eos": ids[-1:] == [tokenizer.eos_token_id]
    }  # fmt: skip
    special.add_to_gguf(writer, quiet=True)


def _prepends_space(step: dict[str, Any]) -> bool:
    """Return whether a step before the merges puts a space before a text; older files have no scheme."""
    kind = step["type"]
    return bool(kind == "Prepend" or (kind == "Metaspace" and step.get("prepend_scheme") != "never"))


def _scores(merges: list[Any], tokens: list[str]) -> list[float]:
    """Return scores by which llama.cpp, which joins the pair of the highest first, merges in this order."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        ranks.setdefault("".join(pair), rank)
    return [-float(ranks.get(token, len(merges))) for token in tokens]
