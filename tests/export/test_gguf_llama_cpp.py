"""A GGUF file runs in llama.cpp as the model does in transformers."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import Replace
from tokenizers.pre_tokenizers import ByteLevel, Metaspace, Split
from transformers import AutoTokenizer

from aespa_pl.export.agreement import compare
from aespa_pl.export.engines import LlamaCpp
from tests.edited import edited
from tests.export.configurations import llama
from tests.export.conftest import MakeRun
from tests.export.gguf_files import llama_cpp, write
from tests.export.runs import VOCABULARY, Known, make_run, save_original
from tests.export.test_gguf_vocabulary import CHINESE, LLAMA_3, MARKS, O200K, SEED, TEKKEN, split


@llama_cpp
@pytest.mark.parametrize(
    ("name", "bits", "group_size"),
    [
        ("llama", 4, 32),
        ("llama-wide", 5, None),  # Q5_K
        ("llama", 2, 64),  # Q2_0
        ("llama-biased", 3, 32),
        ("llama-wide", 4, None),
        ("llama3", 4, 32),
        ("llama-linear", 4, 32),
        ("mistral", 4, 32),
        ("qwen2", 4, 32),
        ("qwen3", 4, 32),
        ("bloom", 4, 32),
        ("llama-yarn", 4, 32),
        ("llama-partial", 4, 32),
        *(
            (name, 4, 32)
            for name in (
                "granite",
                "granite4",
                "granite4-dense",
                "granite-moe",
                "granite4-moe",
                "smollm3",
                "ministral3",
                "ministral3-plain",
                "ministral3-betas",
                "seed-oss",
                "fused",
                "fused-partial",
            )
        ),
        *((name, 4, 32) for name in ("gemma2", "gemma3", "olmo2", "olmo3", "exaone4")),
        *((name, 4, 32) for name in ("gemma4", "gemma4-moe", "gemma4-small", "gemma4-values")),
        *((name, 4, 32) for name in ("glm", "glm4", "ernie4.5", "hunyuan", "lfm2")),
        *(
            (name, 4, 32)
            for name in (
                "qwen2-moe",
                "qwen3-moe",
                "mixtral",
                "olmoe",
                "gpt-oss",
                "qwen3-next",
                "qwen3.5",
                "qwen3.5-grouped",
                "qwen3.5-moe",
                "glm4-moe",
                "ernie4.5-moe",
                "hunyuan-moe",
                "lfm2-moe",
                "minimax",
                "glm4-flash",
                "deepseek-v2",
                "deepseek-v3",
                "deepseek-v3-yarn",
            )
        ),
    ],
)
def test_llama_cpp_gives_the_same_distributions(
    name: str, bits: int, group_size: int | None, known: MakeRun, tmp_path: Path
) -> None:
    run = known(name, bits, group_size, symmetric=bits == 2)
    write(run, tmp_path)
    ids = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        reference = run.model(ids[None], use_cache=False).logits[0]
    found = LlamaCpp().logits(tmp_path, ids, VOCABULARY)
    assert compare(LlamaCpp(), reference, found, ids).divergence < 0.005


def serve(file: Path) -> Any:
    """Return llama.cpp's server of a file."""
    xllamacpp = import_module("xllamacpp")
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.warmup, settings.verbosity = str(file), False, 0
    settings.n_ctx, settings.n_parallel = 128, 1
    return xllamacpp.Server(settings)


@llama_cpp
@pytest.mark.parametrize(
    ("stated", "ends", "goes_on"), [(None, (), (10, 11)), ([257, 10, 12], (257, 10, 12), (11,))]
)
def test_llama_cpp_ends_a_text_at_the_tokens_of_the_model(
    stated: list[int] | None, ends: tuple[int, ...], goes_on: tuple[int, ...], tmp_path: Path
) -> None:
    """Without an EOS in the file, its own is token 11."""
    original = save_original(llama(num_hidden_layers=1, eos_token_id=stated), tmp_path / "original")
    with edited(original / "tokenizer_config.json") as settings:
        del settings["eos_token"]
    with torch.no_grad():
        run = make_run(original, tmp_path / "version_0", 4, 32)
    write(run, tmp_path / "out")
    server = serve(tmp_path / "out" / "model.gguf")
    for token in (*ends, *goes_on):
        options = {"max_tokens": 3, "temperature": 0, "logit_bias": [[token, 1000.0]]}
        answer = server.handle_completions({"prompt": [1, 2, 3], **options})
        assert answer["choices"][0]["finish_reason"] == ("stop" if token in ends else "length")


def tokenized(file: Path, text: str) -> list[int]:
    """Return the token ids that llama.cpp's server gives a text."""
    server = serve(file)
    request = Request(f"{server.listening_address}/tokenize", json.dumps({"content": text}).encode())
    with build_opener(ProxyHandler({})).open(request) as answer:
        found: list[int] = json.load(answer)["tokens"]
    # its loop runs when it has completed something; a server that ends before that waits for it for ever
    server.handle_completions({"prompt": [0], "max_tokens": 1})
    return found


@llama_cpp
def test_llama_cpp_splits_text_as_the_tokenizer_does(known: MakeRun, tmp_path: Path) -> None:
    run = known("llama", 4, 32)
    write(run, tmp_path)
    text = "The cat's 123 hats in the\n\n  theatre, naïve 日本 </s> over"
    ids = AutoTokenizer.from_pretrained(run.original)(text)["input_ids"]
    assert tokenized(tmp_path / "model.gguf", text) == ids


@llama_cpp
@pytest.mark.parametrize(
    ("patterns", "whole"),
    [
        ((LLAMA_3,), True),
        ((LLAMA_3,), False),
        ((LLAMA_3.replace("{1,3}", ""),), False),
        ((MARKS,), False),
        ((SEED,), False),
        ((O200K,), False),
        ((TEKKEN,), True),
        (CHINESE, False),
    ],
)
def test_llama_cpp_splits_text_by_the_rule_of_the_name(
    patterns: tuple[str, ...], *, whole: bool, fresh: Known, tmp_path: Path
) -> None:
    """Each rule lets another of the pairs merge: digits, cases, a mark with the end of the line, or none.

    A rule of whole words gives "cat" its token, which no merge makes.
    """
    merges = [("1", "2"), (".", "Ċ"), ("Ġ", "t"), ("'", "s"), ("Ċ", "Ċ"), ("t", "h"), ("e", "T"), ("/", "Ċ")]
    tokens = [*sorted(ByteLevel.alphabet()), *map("".join, merges), "Ġcat"]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=whole))
    tokenizer.pre_tokenizer = split(*patterns)
    tokenizer.save(str(fresh.original / "tokenizer.json"))
    write(fresh, tmp_path / "out")
    text = "the cat's 12 hats.\n\nthe  theTheatre 'S naïve e\u0301t\u0301 日本.\r\n 12 and/\n theTHE cat"
    assert tokenized(tmp_path / "out" / "model.gguf", text) == tokenizer.encode(text).ids


@llama_cpp
@pytest.mark.parametrize("space_first", [True, False])
def test_llama_cpp_splits_text_as_sentencepiece_does(
    *, space_first: bool, fresh: Known, tmp_path: Path
) -> None:
    """As transformers 5 writes a tokenizer.model: spaces are Metaspace's, bytes stand for the unknown.

    Gemma's spaces are replaced, and a split at spaces behind that finds none.
    """
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("a", "t"), ("▁", "c"), ("▁c", "at")]
    pieces = ["<unk>", *byte_tokens, *"▁theca", *map("".join, merges)]
    bpe = BPE({t: i for i, t in enumerate(pieces)}, merges, byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(bpe)
    if space_first:
        tokenizer.pre_tokenizer = Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = Replace(" ", "▁")
        tokenizer.pre_tokenizer = Split(" ", "merged_with_previous")
    tokenizer.save(str(fresh.original / "tokenizer.json"))
    write(fresh, tmp_path / "out")
    text = "the cat's hats  at the\n theatre, naïve 日本 "
    assert tokenized(tmp_path / "out" / "model.gguf", text) == tokenizer.encode(text).ids
