"""GGUF files hold ``scale * (q - z)`` in the smallest type, or are refused."""

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from torch import Tensor

from aespa_pl.errors import UserError
from aespa_pl.export.gguf import Gguf
from aespa_pl.export.gguf_values import dequantized
from aespa_pl.export.quantized import QuantizedModel
from tests.export.conftest import MakeRun
from tests.export.gguf_files import Q, write
from tests.export.runs import HEADS, Known

Q2_0 = GGMLQuantizationType(42)
"""Numbers of llama.cpp v0.5.0, as its llama_ftype_get_default_type says."""
FILE_TYPES = {Q.Q4_0: 2, Q.Q5_0: 8, Q.Q8_0: 7, Q2_0: 41}
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


def gguf_name(name: str) -> str:
    _, _, index, *module, what = name.split(".")
    return f"blk.{index}.{NAMES['.'.join(module)]}.{what}"


def pairs(weight: Tensor, heads: int) -> Tensor:
    """Bring rows i and i + d_head / 2 of each head next to each other."""
    half = len(weight) // heads // 2
    rows = [
        head * 2 * half + i + second * half for head in range(heads) for i in range(half) for second in (0, 1)
    ]
    return weight[rows]


def query_then_key_then_value(weight: Tensor) -> Tensor:
    size = len(weight) // (3 * HEADS)
    rows = [(3 * head + part) * size + i for part in range(3) for head in range(HEADS) for i in range(size)]
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
        value = torch.tensor(dequantized(tensor.data, tensor.tensor_type))
        assert torch.equal(value, arranged(known, name, known.weight(name))), name
        bias = name.replace("weight", "bias")
        if bias in state:
            expected = arranged(known, bias, state[bias].half().float())
            assert torch.equal(torch.tensor(tensors[gguf_name(bias)].data), expected), bias
    assert {tensors[gguf_name(name)].tensor_type for name in known.matrices} == types


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
        ("llama-wide", 5, {Q.Q5_K}),
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


@pytest.mark.parametrize(
    ("bits", "group_size", "kind"),
    [(4, 32, Q.Q4_0), (5, 32, Q.Q5_0), (8, 32, Q.Q8_0), (2, 64, Q2_0), (2, None, Q2_0)],
)
def test_symmetric_grids_need_one_bit_less(
    bits: int, group_size: int | None, kind: GGMLQuantizationType, known: MakeRun, tmp_path: Path
) -> None:
    run = known("llama", bits, group_size, symmetric=True)
    reader = write(run, tmp_path)
    assert_holds(run, reader, {kind})
    assert reader.get_field("general.file_type").contents() == FILE_TYPES[kind]


@pytest.mark.parametrize(
    ("name", "bits", "group_size", "message"),
    [
        ("opt", 4, 32, "no architecture for model_type opt. Use --format compressed-tensors"),
        ("bloom-post-residual", 4, 32, "ignores apply_residual_connection_post_layernorm. Use"),
        ("llama-dynamic", 4, 32, "rope_type is dynamic, and llama.cpp has default or linear"),
        ("smollm3-other", 4, 32, "llama.cpp leaves RoPE out of every 4th block, no_rope_layers of"),
        ("seed-oss-biased", 4, 32, "llama.cpp has no seed_oss with attention_out_bias True"),
        ("gemma3-scaled", 4, 32, "llama.cpp runs query_pre_attn_scalar 32, not 20"),
        ("qwen3-moe-mixed", 4, 32, "llama.cpp has experts in all blocks of a mixture of experts"),
        ("qwen3.5-grouped", 4, 64, "value heads of linear attention in another order, and groups of"),
        ("olmo3-odd", 4, 32, "windows in all blocks but every n-th, layer_types in others"),
        ("exaone4-mixed", 4, 32, "llama.cpp has sliding windows in a exaone4 of 64 blocks alone"),
        ("llama", 8, 32, "no block type .* It holds 2 to 7 bits .* Use --format compressed-tensors"),
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


@pytest.mark.parametrize(
    ("bits", "group_size", "words"),
    [
        (2, None, "o_proj, gate_proj, up_proj as Q4_0 (4.5 bits a weight): blocks of Q2_K (2.625 "),
        (2, 32, "up_proj, down_proj as Q4_0"),
        (4, None, "as Q5_0 (5.5 bits a weight): blocks of Q4_K (4.5 bits a weight)"),
    ],
)
def test_a_larger_type_than_the_bits_need_is_said_with_its_reason(
    bits: int, group_size: int | None, words: str, known: MakeRun
) -> None:
    remark = Gguf().remark(QuantizedModel.open(known("llama", bits, group_size).folder))
    assert remark is not None
    assert words in remark
    assert "have 256 columns" in remark


@pytest.mark.parametrize(("name", "bits"), [("llama-wide", 2), ("llama-wide", 4), ("llama", 3)])
def test_the_smallest_type_of_all_needs_no_remark(name: str, bits: int, known: MakeRun) -> None:
    # at 3 bits the type of 32 columns is as small as that of 256
    assert Gguf().remark(QuantizedModel.open(known(name, bits, None).folder)) is None


def test_a_file_with_the_newest_type_says_what_reads_it(known: MakeRun) -> None:
    remark = Gguf().remark(QuantizedModel.open(known("llama", 2, 64, symmetric=True).folder))
    assert remark == "Q2_0 is read by llama.cpp of v0.5.0 or later, and not yet by transformers"


def test_long_contexts_that_llama_cpp_runs_otherwise_are_told_of(known: MakeRun) -> None:
    remark = Gguf().remark(QuantizedModel.open(known("gpt-oss-exact", 4, 32, symmetric=True).folder))
    assert remark == "llama.cpp rounds the range of YaRN's frequencies, so long contexts differ there"
