"""Tokens, scores and spaces of SentencePiece's kind are those of the tokenizer, or it is refused."""

from itertools import pairwise
from math import inf
from pathlib import Path

import pytest
from gguf import TokenType
from tokenizers import Tokenizer, normalizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Metaspace, PreTokenizer, Whitespace

from aespa_pl.models.llama_cpp_tokenizer import adds_spaces, unsupported_tokenizer
from tests.edited import edited
from tests.export.test_gguf_vocabulary import fields


def test_sentencepiece_merges_in_the_order_of_the_merges(tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, "<0x41>": 1, "a": 2, "b": 3, "c": 4, "bc": 5, "ab": 6, "abc": 7}
    merges = [("b", "c"), ("a", "b"), ("ab", "c"), ("a", "bc")]
    tokenizer = Tokenizer(BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert unsupported_tokenizer(tmp_path) is None
    found = fields(tmp_path, 8)
    assert found["model"] == "llama"
    assert found["add_space_prefix"] is True
    score = dict(zip(found["tokens"], found["scores"], strict=True))
    assert score["bc"] > score["ab"] > score["abc"] > score["a"]
    assert found["token_type"][1] == TokenType.BYTE
    assert "merges" not in found


def merged(text: str, score: dict[str, float]) -> list[str]:
    """Join the pair whose result has the highest score, the leftmost first, as llama.cpp does."""
    pieces = [*text]
    while pairs := [(score.get(a + b), -i) for i, (a, b) in enumerate(pairwise(pieces))]:
        best, place = max((s, i) for s, i in [*pairs, (-inf, 0)] if s is not None)
        if best == -inf:
            break
        pieces[-place : 2 - place] = ["".join(pieces[-place : 2 - place])]
    return pieces


def test_a_token_that_two_merges_make_has_the_rank_of_the_first(tmp_path: Path) -> None:
    tokens = ["<unk>", "<0x41>", *"abcd", "ab", "bc", "cd", "abc"]
    merges = [("a", "b"), ("b", "c"), ("ab", "c"), ("c", "d"), ("a", "bc")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = fields(tmp_path, len(tokens))
    score = dict(zip(found["tokens"], found["scores"], strict=True))
    assert tokenizer.encode("abcd").tokens == ["abc", "d"]  # the library's answer
    assert merged("abcd", score) == ["abc", "d"]


def save_pieces(folder: Path, normalizer: normalizers.Normalizer | None, rule: PreTokenizer | None) -> None:
    tokenizer = Tokenizer(BPE({"<unk>": 0, "▁a": 1}, [], byte_fallback=True, unk_token="<unk>"))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if rule is not None:
        tokenizer.pre_tokenizer = rule
    tokenizer.save(str(folder / "tokenizer.json"))


SPACES = normalizers.Replace(" ", "▁")


def test_added_tokens_of_spaces_stay_spaces(tmp_path: Path) -> None:
    """llama.cpp writes a token of a user as it is, and turns the sign into a space in a normal one alone."""
    save_pieces(tmp_path, SPACES, None)
    path = str(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_tokens(["▁▁", "<tool>"])
    tokenizer.save(path)
    found = fields(tmp_path, 4)
    assert found["tokens"][2:] == ["▁▁", "<tool>"]
    assert found["token_type"][2:] == [TokenType.NORMAL, TokenType.USER_DEFINED]


@pytest.mark.parametrize(
    ("normalizer", "rule", "expected"),
    [
        (normalizers.Sequence([normalizers.Prepend("▁"), SPACES]), None, True),
        (SPACES, None, False),
        (None, Metaspace(prepend_scheme="first", split=False), True),
        (None, Metaspace(prepend_scheme="always"), True),
        (None, Metaspace(prepend_scheme="never"), False),
    ],
)
def test_space_before_the_text_is_the_tokenizers(
    normalizer: normalizers.Normalizer | None, rule: PreTokenizer | None, expected: bool, tmp_path: Path
) -> None:
    save_pieces(tmp_path, normalizer, rule)
    assert unsupported_tokenizer(tmp_path) is None
    assert fields(tmp_path, 2)["add_space_prefix"] is expected
    # llama.cpp begins a text behind each added token, and so does a normalizer, but not a Metaspace
    assert adds_spaces(tmp_path) is (expected and normalizer is None)


def test_spaces_that_only_llama_cpp_merges_are_refused(tmp_path: Path) -> None:
    for split_first, refused in ((True, True), (False, False)):
        save_pieces(tmp_path, None, Metaspace(prepend_scheme="never", split=split_first))
        with edited(tmp_path / "tokenizer.json") as content:
            content["model"]["vocab"] |= {"\u2581": 2, "\u2581\u2581": 3}
            content["model"]["merges"].append(["\u2581", "\u2581"])
        tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        assert (3 in tokenizer.encode("a  a").ids) is not split_first
        said = unsupported_tokenizer(tmp_path)
        assert ("Metaspace with split" in str(said)) is refused


def test_space_before_the_text_in_older_files(tmp_path: Path) -> None:
    save_pieces(tmp_path, None, Metaspace(prepend_scheme="always", split=False))
    path = tmp_path / "tokenizer.json"
    with edited(path) as content:
        del content["pre_tokenizer"]["prepend_scheme"]
        content["pre_tokenizer"]["add_prefix_space"] = True
    assert len(Tokenizer.from_file(str(path)).encode("a").ids) == 2  # the library's answer: a space, and a
    assert fields(tmp_path, 2)["add_space_prefix"] is True


@pytest.mark.parametrize(
    ("normalizer", "rule", "changes"),
    [
        (normalizers.Lowercase(), Whitespace(), "Lowercase, Whitespace"),
        (normalizers.Sequence([normalizers.Replace("c", "h"), SPACES]), None, "Replace"),
        (normalizers.Sequence([normalizers.Prepend("▁the"), SPACES]), None, "Prepend"),
        (normalizers.Prepend("▁"), None, "spaces stay"),
    ],
)
def test_pieces_of_a_changed_text_are_refused(
    normalizer: normalizers.Normalizer, rule: PreTokenizer | None, changes: str, tmp_path: Path
) -> None:
    save_pieces(tmp_path, normalizer, rule)
    assert f"does ({changes})" in str(unsupported_tokenizer(tmp_path))
