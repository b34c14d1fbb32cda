"""What is not quantized keeps its values in a GGUF file, and its metadata describe the model."""

import json
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGUFReader
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from aespa_pl.export.gguf import Gguf
from aespa_pl.export.quantized import QuantizedModel
from tests.export.conftest import MakeRun
from tests.export.gguf_files import Q, write
from tests.export.runs import VOCABULARY, Known
from tests.export.test_gguf_vocabulary import fields, save_bytes


def test_other_tensors_keep_their_values(known: MakeRun, tmp_path: Path) -> None:
    run = known("llama-untied", 3, 32)
    tensors = {tensor.name: tensor for tensor in write(run, tmp_path, Gguf("keep")).tensors}
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


def test_experts_and_router_of_gemma4_have_llama_cpps_names(known: MakeRun, tmp_path: Path) -> None:
    """The library gguf has no names for them."""
    run = known("gemma4-moe", 4, 32)
    tensors = {tensor.name: tensor for tensor in write(run, tmp_path).tensors}
    block = run.model.get_submodule("model.layers.1")
    gate, up = block.get_parameter("experts.gate_up_proj").chunk(2, 1)
    for ours, theirs in (
        (gate, "ffn_gate_exps.weight"),
        (up, "ffn_up_exps.weight"),
        (block.get_parameter("experts.down_proj"), "ffn_down_exps.weight"),
        (block.get_parameter("router.scale"), "ffn_gate_inp.scale"),
        (block.get_parameter("router.per_expert_scale"), "ffn_down_exps.scale"),
    ):
        tensor = tensors[f"blk.1.{theirs}"]
        value = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        torch.testing.assert_close(value, ours.detach().half().float(), rtol=0, atol=1e-3)


def test_borrowed_keys_and_embeddings_of_blocks_are_described(known: MakeRun, tmp_path: Path) -> None:
    """Of Gemma 4 E2B and E4B."""
    run = known("gemma4-small", 4, 32)
    reader = write(run, tmp_path, Gguf("keep"))
    for name, expected in {
        "attention.shared_kv_layers": 3,
        "embedding_length_per_layer_input": 32,
        "feed_forward_length": [256] * 3 + [512] * 3,  # wider where keys are borrowed
    }.items():
        assert field(reader, f"gemma4.{name}") == expected, name
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert ("blk.2.attn_k.weight" in tensors, "blk.3.attn_k.weight" in tensors) == (True, False)
    table = tensors["per_layer_token_embd.weight"]
    value = torch.tensor(gguf.dequantize(table.data, table.tensor_type))
    assert torch.equal(value, run.model.state_dict()["model.embed_tokens_per_layer.weight"].half().float())


def test_tied_head_is_not_written(known: MakeRun, tmp_path: Path) -> None:
    names = {tensor.name for tensor in write(known("llama", 3, 32), tmp_path).tensors}
    assert "token_embd.weight" in names
    assert "output.weight" not in names


def test_embedding_in_q8_0_is_within_half_a_step(known: MakeRun, tmp_path: Path) -> None:
    run = known("llama-untied", 3, 32)
    reader = write(run, tmp_path)
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
    ("size", "config", "generation", "expected"),
    [
        # llama.cpp would end texts at token 11: a row without a token, BOS, or another control token does not
        (6, {}, None, {"eos": 5}),
        (5, {"bos_token_id": 4}, None, {"eos": 4}),
        (5, {}, None, {"eos": 3}),
        (5, {"eos_token_id": 2}, None, {"eos": 2}),
        (5, {"eos_token_id": [2, 0]}, None, {"eos": 2, "eot": 0}),
        (5, {"eos_token_id": [2, 0]}, [], {"eos": 2, "eot": 0}),
        (5, {"eos_token_id": 0}, [-1, 9, 1, 2, 0], {"eos": 0, "eot": 1, "eom": 2}),
    ],
)
def test_every_file_names_the_tokens_that_end_a_text(
    size: int,
    config: dict[str, object],
    generation: list[int] | None,
    expected: dict[str, int],
    tmp_path: Path,
) -> None:
    """The tokens are a, b, ab, <s> of the type CONTROL, and <tool>."""
    save_bytes(tmp_path, ByteLevel(add_prefix_space=False))
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    found = fields(tmp_path, size)
    names = ("eos", "eot", "eom")
    named = {name: found[f"{name}_token_id"] for name in names if f"{name}_token_id" in found}
    assert named == expected


def test_tokens_that_end_a_text_beyond_the_names_are_told_of(fresh: Known) -> None:
    path = fresh.original / "generation_config.json"
    path.write_text('{"eos_token_id": [257, 5, 6]}')
    assert "end a text" not in (Gguf().remark(QuantizedModel.open(fresh.folder)) or "")
    path.write_text('{"eos_token_id": [257, 5, 6, 7, 8]}')
    remark = Gguf().remark(QuantizedModel.open(fresh.folder))
    assert "llama.cpp may not stop at token 7, 8" in (remark or "")


def test_the_chat_template_is_the_one_that_transformers_takes(tmp_path: Path) -> None:
    save_bytes(tmp_path, ByteLevel(add_prefix_space=False))
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "of the configuration"}')
    assert fields(tmp_path, 5)["chat_template"] == "of the configuration"
    (tmp_path / "chat_template.jinja").write_text("of its own file")
    assert fields(tmp_path, 5)["chat_template"] == "of its own file"


def test_tokens_that_llama_cpp_begins_no_text_with_are_named(fresh: Known) -> None:
    model = QuantizedModel.open(fresh.folder)
    file = str(fresh.folder / "model" / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    pair = [("<s>", 256), ("</s>", 257)]
    tokenizer.post_processor = TemplateProcessing(single="</s> <s> $A", special_tokens=pair)
    tokenizer.save(file)
    remark = Gguf().remark(model)
    assert remark is not None
    assert remark.startswith("llama.cpp begins no text with </s><s>, as the model's tokenizer does")
