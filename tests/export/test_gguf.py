"""GGUF files hold ``scale * (q - z)`` and run in llama.cpp as the model does in transformers."""

import ctypes
import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from urllib.request import ProxyHandler, Request, build_opener

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Metaspace
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from aespa_pl.errors import UserError
from aespa_pl.export.agreement import compare
from aespa_pl.export.engines import LlamaCpp
from aespa_pl.export.gguf import Gguf
from aespa_pl.export.gguf_blocks import BLOCK_TYPES, BlockType, smallest_type
from aespa_pl.export.proof import prove
from aespa_pl.export.quantized import QuantizedMatrix, QuantizedModel
from tests.export.conftest import MakeRun
from tests.export.runs import HEADS, VOCABULARY, Known, dequantized

llama_cpp = pytest.mark.skipif(
    find_spec("xllamacpp") is None, reason="needs llama.cpp: pip install xllamacpp"
)
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}


def write(known: Known, folder: Path, chosen: Gguf | None = None) -> GGUFReader:
    model, chosen = QuantizedModel.open(known.folder), chosen or Gguf()
    chosen.refuse(model)
    chosen.write(model, folder, lambda: None)
    prove(model, chosen, folder)
    return GGUFReader(folder / "model.gguf")


def gguf_name(name: str) -> str:
    _, _, index, *module, what = name.split(".")
    return f"blk.{index}.{NAMES['.'.join(module)]}.{what}"


def pairs(weight: Tensor, heads: int) -> Tensor:
    """Bring rows i and i + d_head / 2 of each head next to each other."""
    half = len(weight) // heads // 2
    rows = [
        head * 2 * half + i + second * half
        for head in range(heads)
        for i in range(half)
        for second in (0, 1)
    ]
    return weight[rows]


def query_then_key_then_value(weight: Tensor) -> Tensor:
    size = len(weight) // (3 * HEADS)
    rows = [
        (3 * head + part) * size + i
        for part in range(3)
        for head in range(HEADS)
        for i in range(size)
    ]
    return weight[rows]


def arranged(known: Known, name: str, value: Tensor) -> Tensor:
    config = known.model.config
    if config.model_type in ("llama", "mistral"):
        if "q_proj" in name:
            return pairs(value, config.num_attention_heads)
        if "k_proj" in name:
            return pairs(value, config.num_key_value_heads)
    return query_then_key_then_value(value) if "query_key_value" in name else value


def assert_holds(known: Known, reader: GGUFReader, types: set[GGMLQuantizationType]) -> None:
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    state = known.model.state_dict()
    for name in known.matrices:
        tensor = tensors[gguf_name(name)]
        value = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(value, arranged(known, name, known.weight(name))), name
        bias = name.replace("weight", "bias")
        if bias in state:
            expected = arranged(known, bias, state[bias].half().float())
            assert torch.equal(torch.tensor(tensors[gguf_name(bias)].data), expected), bias
    assert {tensors[gguf_name(name)].tensor_type for name in known.matrices} == types


Q = GGMLQuantizationType
TYPES = {2: Q.Q4_0, 3: Q.Q4_0, 4: Q.Q5_0, 5: Q.Q8_0, 6: Q.Q8_0, 7: Q.Q8_0}


@pytest.mark.parametrize(
    ("name", "bits", "group_size"),
    [
        *(
            (name, bits, group_size)
            for name in ("llama-block", "bloom-block")
            for bits in (2, 3, 4)
            for group_size in (32, 128)
        ),
        *(("llama-block", bits, 32) for bits in (5, 6, 7)),
    ],
)
def test_groups_are_exact_in_the_smallest_type(
    name: str, bits: int, group_size: int, known: MakeRun, tmp_path: Path
) -> None:
    run = known(name, bits, group_size)
    assert_holds(run, write(run, tmp_path), {TYPES[bits]})


@pytest.mark.parametrize(
    ("name", "bits", "types"),
    [
        ("llama-wide", 2, {Q.Q2_K}),
        ("llama-wide", 3, {Q.Q4_K}),
        ("llama-wide", 4, {Q.Q4_K}),
        ("llama-wide", 5, {Q.Q8_0}),
        ("llama", 2, {Q.Q2_K, Q.Q4_0}),  # only down_proj has 256 columns
        ("llama", 4, {Q.Q4_K, Q.Q5_0}),
        ("llama-uneven", 3, {Q.Q4_0}),
        ("llama-untied", 3, {Q.Q4_K, Q.Q4_0}),
        ("llama-biased", 4, {Q.Q4_K, Q.Q5_0}),
        ("bloom", 2, {Q.Q4_0, Q.Q2_K}),
        ("bloom", 4, {Q.Q5_0, Q.Q4_K}),
        ("qwen2", 4, {Q.Q4_K, Q.Q5_0}),
        ("qwen3", 3, {Q.Q4_K, Q.Q4_0}),
        ("mistral", 4, {Q.Q4_K, Q.Q5_0}),
    ],
)
def test_rows_with_one_scale_are_exact_in_the_smallest_type(
    name: str, bits: int, types: set[GGMLQuantizationType], known: MakeRun, tmp_path: Path
) -> None:
    run = known(name, bits, None)
    assert_holds(run, write(run, tmp_path), types)


@pytest.mark.parametrize(("bits", "kind"), [(4, Q.Q4_0), (5, Q.Q5_0), (8, Q.Q8_0)])
def test_symmetric_grids_need_one_bit_less(
    bits: int, kind: GGMLQuantizationType, known: MakeRun, tmp_path: Path
) -> None:
    run = known("llama", bits, 32, symmetric=True)
    assert_holds(run, write(run, tmp_path), {kind})


@llama_cpp
@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=lambda kind: kind.type.name)
def test_llama_cpps_own_dequantizer_agrees(kind: BlockType) -> None:
    """Every q with every z, at scales with all eleven bits; the C code runs on the bytes themselves."""
    xllamacpp = import_module("xllamacpp")
    library = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
    bits = {"Q2_K": 2, "Q4_K": 4, "Q4_0": 3, "Q5_0": 4, "Q8_0": 7}[kind.type.name]
    levels = 2**bits
    q = torch.arange(256).repeat(levels, 1).remainder(levels).to(torch.uint8)
    zero = torch.arange(levels, dtype=torch.uint8)[:, None]
    scale = (torch.rand(levels, 1) + 0.01).half()
    encoded = kind.encode(QuantizedMatrix(q, scale, zero))
    result = np.zeros(q.shape, np.float32)
    name = kind.type.name.replace("Q", "q")  # q4_0, q4_K
    getattr(library, f"dequantize_row_{name}")(
        encoded.ctypes.data_as(ctypes.c_void_p),
        result.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int64(result.size),
    )
    assert torch.equal(torch.from_numpy(result), dequantized(q, scale, zero))


@llama_cpp
@pytest.mark.parametrize(
    ("name", "bits", "group_size"),
    [
        ("llama", 4, 32),
        ("llama-biased", 3, 32),
        ("llama-wide", 4, None),
        ("llama3", 4, 32),
        ("llama-linear", 4, 32),
        ("mistral", 4, 32),
        ("qwen2", 4, 32),
        ("qwen3", 4, 32),
        ("bloom", 4, 32),
    ],
)
def test_llama_cpp_gives_the_same_distributions(
    name: str, bits: int, group_size: int | None, known: MakeRun, tmp_path: Path
) -> None:
    run = known(name, bits, group_size)
    write(run, tmp_path)
    ids = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        reference = run.model(ids[None], use_cache=False).logits[0]
    found = LlamaCpp().logits(tmp_path, ids, VOCABULARY)
    assert compare(LlamaCpp(), reference, found, ids).divergence < 0.005


@llama_cpp
def test_llama_cpp_splits_text_as_the_tokenizer_does(known: MakeRun, tmp_path: Path) -> None:
    xllamacpp = import_module("xllamacpp")
    run = known("llama", 4, 32)
    write(run, tmp_path)
    text = "The cat's 123 hats in the\n\n  theatre, naïve 日本 </s> over"
    ids = AutoTokenizer.from_pretrained(run.original)(text)["input_ids"]
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.warmup, settings.verbosity = (
        str(tmp_path / "model.gguf"),
        False,
        0,
    )
    settings.n_ctx, settings.n_parallel = 128, 1
    server = xllamacpp.Server(settings)
    answers = [
        server.handle_completions({"prompt": prompt, "max_tokens": 8, "temperature": 0})
        for prompt in (text, ids)
    ]
    assert answers[0]["usage"]["prompt_tokens"] == len(ids)
    assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]


def tokenized(file: Path, text: str) -> list[int]:
    """Return the token ids that llama.cpp's server gives a text."""
    xllamacpp = import_module("xllamacpp")
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.warmup, settings.verbosity = str(file), False, 0
    settings.n_ctx, settings.n_parallel = 128, 1
    server = xllamacpp.Server(settings)
    request = Request(
        f"{server.listening_address}/tokenize", json.dumps({"content": text}).encode()
    )
    with build_opener(ProxyHandler({})).open(request) as answer:
        found: list[int] = json.load(answer)["tokens"]
        return found


@llama_cpp
def test_llama_cpp_splits_text_as_sentencepiece_does(fresh: Known, tmp_path: Path) -> None:
    """As transformers 5 writes a tokenizer.model: spaces are Metaspace's, bytes stand for the unknown."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("a", "t"), ("▁", "c"), ("▁c", "at")]
    pieces = ["<unk>", *byte_tokens, *"▁theca", *map("".join, merges)]
    bpe = BPE({t: i for i, t in enumerate(pieces)}, merges, byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = Metaspace(prepend_scheme="first", split=False)
    tokenizer.save(str(fresh.original / "tokenizer.json"))
    write(fresh, tmp_path / "out")
    text = "the cat's hats  at the\n theatre, naïve 日本 "
    assert tokenized(tmp_path / "out" / "model.gguf", text) == tokenizer.encode(text).ids


def test_other_tensors_keep_their_values(known: MakeRun, tmp_path: Path) -> None:
    run = known("llama-untied", 3, 32)
    tensors = {tensor.name: tensor for tensor in write(run, tmp_path).tensors}
    state = run.model.state_dict()
    for ours, theirs, kind in (
        ("model.embed_tokens.weight", "token_embd.weight", Q.F16),
        ("lm_head.weight", "output.weight", Q.F16),
        ("model.norm.weight", "output_norm.weight", Q.F32),
        ("model.layers.1.input_layernorm.weight", "blk.1.attn_norm.weight", Q.F32),
    ):
        assert tensors[theirs].tensor_type == kind
        value = torch.tensor(gguf.dequantize(tensors[theirs].data, kind))
        assert torch.equal(value, state[ours].half().float())


def test_tied_head_is_not_written(known: MakeRun, tmp_path: Path) -> None:
    names = {tensor.name for tensor in write(known("llama", 3, 32), tmp_path).tensors}
    assert "token_embd.weight" in names
    assert "output.weight" not in names


def test_embedding_in_q8_0_is_within_half_a_step(known: MakeRun, tmp_path: Path) -> None:
    run = known("llama-untied", 3, 32)
    reader = write(run, tmp_path, Gguf("q8_0"))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for ours, theirs in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("lm_head.weight", "output.weight"),
    ):
        tensor = tensors[theirs]
        assert tensor.tensor_type == Q.Q8_0
        value = torch.tensor(gguf.dequantize(tensor.data, Q.Q8_0))
        original = run.model.state_dict()[ours].half().float()
        blocks = original.unflatten(1, (-1, 32))
        step = blocks.abs().amax(-1, keepdim=True) / 127
        # the scale itself is rounded to float16: 127 steps of 2 ** -11
        assert ((value.unflatten(1, (-1, 32)) - blocks).abs() <= step * (0.5 + 127 * 2**-11)).all()


def field(reader: GGUFReader, name: str) -> object:
    return reader.get_field(name).contents()


def test_hyperparameters(known: MakeRun, tmp_path: Path) -> None:
    reader = write(known("mistral", 4, 32), tmp_path)
    expected = {
        "general.architecture": "llama",
        "general.file_type": gguf.LlamaFileType.MOSTLY_Q5_0,
        "llama.context_length": 100,  # the window: llama.cpp has none for this architecture
        "llama.embedding_length": 128,
        "llama.block_count": 2,
        "llama.feed_forward_length": 256,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": 32,
        "llama.vocab_size": VOCABULARY,
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.ggml.pre": "gpt-2",
    }
    assert {name: field(reader, name) for name in expected} == expected


def test_frequency_factors_of_llama_3(known: MakeRun, tmp_path: Path) -> None:
    run = known("llama3", 4, 32)
    tensors = {tensor.name: tensor.data for tensor in write(run, tmp_path).tensors}
    config: PreTrainedConfig = run.model.config
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = torch.tensor([10000.0 ** (-2 * i / 32) for i in range(16)])
    assert torch.allclose(plain / torch.tensor(tensors["rope_freqs.weight"]), scaled, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "bits", "group_size", "message"),
    [
        ("opt", 4, 32, "no architecture for model_type opt. Use --format compressed-tensors"),
        ("bloom-post-residual", 4, 32, "ignores apply_residual_connection_post_layernorm. Use"),
        ("llama-yarn", 4, 32, "rope_type yarn is none of default, linear, llama3. Use --format"),
        (
            "llama",
            8,
            32,
            "no block type .* It holds 2 to 7 bits .* Use --format compressed-tensors",
        ),
        ("llama", 4, 16, "no block type .* groups of a multiple of 32"),
        ("llama-odd", 4, None, "q_proj.weight with 40 columns"),
    ],
)
def test_what_cannot_be_exact_is_refused_with_what_can(
    name: str, bits: int, group_size: int | None, message: str, known: MakeRun
) -> None:
    model = QuantizedModel.open(known(name, bits, group_size).folder)
    with pytest.raises(UserError, match=rf"--format gguf cannot hold .*{bits} bits.*{message}"):
        Gguf().refuse(model)


@pytest.mark.parametrize("columns", [32, 256, 512, 96, 40])
@pytest.mark.parametrize("group_size", [None, 32, 64, 256])
@pytest.mark.parametrize("symmetric", [False, True])
def test_smallest_type_is_the_smallest_that_holds_the_range(
    columns: int, group_size: int | None, symmetric: bool
) -> None:
    ranges = {Q.Q4_0: (-8, 7), Q.Q5_0: (-16, 15), Q.Q8_0: (-128, 127)}
    whole = columns % 256 == 0 and (group_size or columns) % 256 == 0
    for bits in range(2, 9):
        top = 2**bits - 1
        middle = 2 ** (bits - 1)
        low, high = (-middle, top - middle) if symmetric else (-top, top)
        possible = [kind for kind, (a, b) in ranges.items() if a <= low and high <= b]
        if columns % 32:
            possible = []
        if whole and bits <= 4:
            possible = [Q.Q2_K if bits == 2 else Q.Q4_K, *possible]
        found = smallest_type(bits, columns, group_size, symmetric=symmetric)
        assert (found and found.type) == (possible[0] if possible else None)
