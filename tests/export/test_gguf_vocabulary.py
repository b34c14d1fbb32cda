"""Tokens, merges and rules of splitting are those of the tokenizer, or the tokenizer is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader, GGUFWriter, TokenType
from tokenizers import Regex, Tokenizer, normalizers
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split, Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from aespa_pl.errors import UserError
from aespa_pl.export.gguf_vocabulary import add_vocabulary, unnamed_start
from aespa_pl.models.llama_cpp_tokenizer import unsupported_tokenizer

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEED = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1}| ?[^\\s\\p{L}\\p{N}\r\n]+"
    "|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
"""With the characters themselves, as the file has it."""
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""gpt-oss's."""
MARKS = (
    LLAMA_3.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+")
    .replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
    .replace("{1,3}", "")
)
"""Qwen3.5's."""
TEKKEN = O200K.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")
"""Ministral 3's."""
CHINESE = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",  # noqa: RUF001 - as the file has it
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
"""Hunyuan's, as DeepSeek's; one after the other."""
BYTES = ByteLevel(add_prefix_space=False, use_regex=False)
BYTES_ALONE = ByteLevel(add_prefix_space=False)


def split(*patterns: str) -> PreTokenizer:
    return Sequence([*(Split(Regex(pattern), "isolated") for pattern in patterns), BYTES])


def fields(folder: Path, size: int, architecture: str = "llama") -> dict[str, Any]:
    writer = GGUFWriter(folder / "vocabulary.gguf", architecture)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    add_vocabulary(writer, folder, size, tokenizer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    reader = GGUFReader(folder / "vocabulary.gguf")
    prefix = "tokenizer."
    return {
        name.removeprefix(prefix).removeprefix("ggml."): field.contents()
        for name, field in reader.fields.items()
        if name.startswith(prefix)
    }


def save_bytes(
    folder: Path,
    rule: PreTokenizer,
    *,
    whole_words: bool = False,
    normalizer: normalizers.Normalizer | None = None,
) -> None:
    vocabulary = {"a": 0, "b": 1, "ab": 2, "<s>": 3}
    tokenizer = Tokenizer(BPE(vocabulary, [("a", "b")], ignore_merges=whole_words))
    tokenizer.pre_tokenizer = rule
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def test_tokens_with_their_types(tmp_path: Path) -> None:
    save_bytes(tmp_path, ByteLevel(add_prefix_space=False))
    config = {"bos_token": "<s>", "chat_template": "{{ messages }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = fields(tmp_path, 7)
    assert found["tokens"] == ["a", "b", "ab", "<s>", "<tool>", "[PAD5]", "[PAD6]"]
    normal, unused = TokenType.NORMAL, TokenType.UNUSED
    control, user = TokenType.CONTROL, TokenType.USER_DEFINED
    assert found["token_type"] == [normal, normal, normal, control, user, unused, unused]
    assert found["merges"] == ["a b"]
    assert found["bos_token_id"] == 3
    assert found["model"] == "gpt2"


@pytest.mark.parametrize("architecture", ["llama", "gemma4"])
def test_special_tokens_that_are_read_in_the_output_are_no_control_tokens(
    architecture: str, tmp_path: Path
) -> None:
    """llama.cpp drops control tokens, and finds Gemma 4's thoughts and calls of tools by theirs."""
    save_bytes(tmp_path, ByteLevel(add_prefix_space=False))
    content = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(content.replace("<s>", "<|channel>"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    expected = TokenType.USER_DEFINED if architecture == "gemma4" else TokenType.CONTROL
    assert fields(tmp_path, 5, architecture)["token_type"][3] == expected


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        (ByteLevel(add_prefix_space=False), "gpt-2"),
        (Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]), "smollm"),
        (split(LLAMA_3), "smaug-bpe"),
        (split(LLAMA_3.replace("{1,3}", "")), "qwen2"),
        (split(MARKS), "qwen35"),
        (split(SEED), "seed-coder"),
        (split(O200K), "gpt-4o"),
        (split(*CHINESE), "deepseek-v3"),
        (split(r" ?[^(\s|[.,!?…。，、।۔،])]+"), "bloom"),  # noqa: RUF001 - its punctuation
    ],
)
def test_rule_of_splitting_has_its_name(rule: PreTokenizer, name: str, tmp_path: Path) -> None:
    save_bytes(tmp_path, rule)
    assert fields(tmp_path, 5)["pre"] == name


@pytest.mark.parametrize(("pattern", "name"), [(LLAMA_3, "llama-bpe"), (TEKKEN, "tekken")])
def test_rule_that_takes_whole_words_has_its_name(pattern: str, name: str, tmp_path: Path) -> None:
    save_bytes(tmp_path, split(pattern), whole_words=True)
    assert fields(tmp_path, 5)["pre"] == name


@pytest.mark.parametrize("begins", [True, False])
def test_the_file_says_whether_a_text_begins_with_a_token(*, begins: bool, tmp_path: Path) -> None:
    """llama.cpp begins one with it by itself, for the rules of some names."""
    save_bytes(tmp_path, split(LLAMA_3), whole_words=True)
    if begins:
        path = str(tmp_path / "tokenizer.json")
        tokenizer = Tokenizer.from_file(path)
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
        tokenizer.save(path)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    found = fields(tmp_path, 5)
    assert (found["add_bos_token"], found["add_eos_token"]) == (begins, False)


def test_a_special_token_of_minus_one_is_none(tmp_path: Path) -> None:
    save_bytes(tmp_path, ByteLevel(add_prefix_space=False))
    (tmp_path / "config.json").write_text('{"pad_token_id": -1, "eos_token_id": 3}')
    found = fields(tmp_path, 5)
    assert found["eos_token_id"] == 3
    assert "padding_token_id" not in found


@pytest.mark.parametrize(
    "rule",
    [
        Whitespace(),
        split(r"\p{N}{1,2}"),
        split(TEKKEN),
        Sequence([Digits(), ByteLevel()]),
        BYTES,
        # ByteLevel's own rule after another, or none of it where llama.cpp has it
        Sequence([Split(Regex(LLAMA_3), "isolated"), ByteLevel(add_prefix_space=False)]),
        Sequence([Digits(individual_digits=True), BYTES]),
    ],
)
def test_rule_without_a_name_is_refused(rule: PreTokenizer, tmp_path: Path) -> None:
    save_bytes(tmp_path, rule)
    assert "llama.cpp has no name for how" in str(unsupported_tokenizer(tmp_path))


def test_other_kinds_of_tokenizers_are_refused(tmp_path: Path) -> None:
    Tokenizer(WordLevel({"a": 0}, "a")).save(str(tmp_path / "tokenizer.json"))
    assert "of the type WordLevel, only BPE is supported" in str(unsupported_tokenizer(tmp_path))


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"model": 1, "added_tokens": []}'])
def test_folder_without_a_tokenizer_json_is_refused(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"tokenizer.json cannot be read: make it with AutoTokenizer"):
        unsupported_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("normalizer", "rule", "changes"),
    [
        (normalizers.Lowercase(), BYTES_ALONE, "Lowercase"),
        (None, ByteLevel(add_prefix_space=True), "add_prefix_space"),
        (normalizers.NFC(), BYTES_ALONE, None),
    ],
)
def test_bytes_of_a_changed_text_are_refused(
    normalizer: normalizers.Normalizer | None, rule: PreTokenizer, changes: str | None, tmp_path: Path
) -> None:
    save_bytes(tmp_path, rule, normalizer=normalizer)
    found = unsupported_tokenizer(tmp_path)
    assert found is None if changes is None else f"does ({changes})" in str(found)


@pytest.mark.parametrize(("template", "named"), [("<s> $A", ""), ("<tool> <s> $A", "<tool><s>"), ("$A", "")])
def test_start_of_a_text_that_a_file_can_not_ask_for_is_named(
    template: str, named: str, tmp_path: Path
) -> None:
    save_bytes(tmp_path, split(LLAMA_3))
    path = str(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokens = [("<s>", 3), ("<tool>", 4)]
    tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=tokens)
    tokenizer.save(path)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    assert unnamed_start(PreTrainedTokenizerFast.from_pretrained(tmp_path)) == named
