"""One wrong bit anywhere in an export is found, and named."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file, save_file

from aespa_pl.errors import UserError
from aespa_pl.export.format import EMBEDDINGS, OTHERS, QUANTIZED, Format, FormatName, make_format, prove
from aespa_pl.export.quantized import QuantizedModel
from tests.export.conftest import MakeRun
from tests.export.folders import written
from tests.export.runs import Known

BLOCK = "model.layers.1."
LAST = "model-00003-of-00003.safetensors"


def made(known: Known, name: FormatName, folder: Path) -> tuple[QuantizedModel, Format]:
    """Write a run in a format, of which both are returned."""
    chosen = make_format(name, None, "keep")
    return written(known.folder, chosen, folder), chosen


@pytest.mark.parametrize(
    ("name", "tensor", "found"),
    [
        ("hf", "mlp.up_proj.weight", "mlp.up_proj.weight differs in 1 of"),
        ("hf", "input_layernorm.weight", "input_layernorm.weight differs in 1 of 128 values"),
        ("compressed-tensors", "mlp.up_proj.weight_packed", "mlp.up_proj.weight differs in 1 of"),
        ("compressed-tensors", "mlp.up_proj.weight_scale", "mlp.up_proj.weight differs in [0-9]+ of"),
        ("compressed-tensors", "mlp.up_proj.weight_zero_point", "mlp.up_proj.weight differs in 32"),
        ("awq", "self_attn.q_proj.qweight", "self_attn.q_proj.weight differs in 1 of"),
        ("awq", "self_attn.q_proj.qzeros", "self_attn.q_proj.weight differs in 32 of"),
        ("gptq", "self_attn.q_proj.qweight", "self_attn.q_proj.weight differs in 1 of"),
        ("gptq", "self_attn.q_proj.g_idx", "self_attn.q_proj.weight differs in"),
    ],
)
def test_one_bit_in_a_shard_is_found(
    name: FormatName, tensor: str, found: str, known: MakeRun, tmp_path: Path
) -> None:
    model, chosen = made(known("llama", 4, 32), name, tmp_path)
    tensors = load_file(tmp_path / LAST)
    changed = tensors[BLOCK + tensor].flatten()[5:6]
    changed.copy_(changed * 2 if changed.is_floating_point() else changed ^ 1)
    save_file(tensors, tmp_path / LAST)
    with pytest.raises(UserError, match=f"{BLOCK}{found}.*nothing was kept.*please report it"):
        prove(model, chosen, tmp_path)


def test_one_bit_in_a_gguf_file_is_found(known: MakeRun, tmp_path: Path) -> None:
    model, chosen = made(known("llama", 4, 32), "gguf", tmp_path)
    file = tmp_path / "model.gguf"
    tensor = next(t for t in GGUFReader(file).tensors if t.name == "blk.1.attn_k.weight")
    content = bytearray(file.read_bytes())
    content[int(tensor.data_offset) + 10] ^= np.uint8(1)
    file.write_bytes(content)
    with pytest.raises(UserError, match=f"{BLOCK}self_attn.k_proj.weight differs in 1 of 8192"):
        prove(model, chosen, tmp_path)


def test_missing_tensor_is_found(known: MakeRun, tmp_path: Path) -> None:
    model, chosen = made(known("llama", 4, 32), "hf", tmp_path)
    tensors = load_file(tmp_path / LAST)
    del tensors[f"{BLOCK}post_attention_layernorm.weight"]
    save_file(tensors, tmp_path / LAST)
    with pytest.raises(UserError, match=f"{BLOCK}post_attention_layernorm.weight is missing"):
        prove(model, chosen, tmp_path)


def test_tensor_of_another_shape_is_found(known: MakeRun, tmp_path: Path) -> None:
    model, chosen = made(known("llama", 4, 32), "hf", tmp_path)
    tensors = load_file(tmp_path / LAST)
    tensors[f"{BLOCK}input_layernorm.weight"] = torch.ones(64)
    save_file(tensors, tmp_path / LAST)
    with pytest.raises(UserError, match=r"input_layernorm.weight is \[64\], not \[128\]"):
        prove(model, chosen, tmp_path)


def test_sizes_are_the_files_bytes(known: MakeRun, tmp_path: Path) -> None:
    run = known("llama-untied", 2, 32)
    model, chosen = made(run, "compressed-tensors", tmp_path)
    sizes = prove(model, chosen, tmp_path)
    matrices = sum(q.numel() for q, _, _ in run.matrices.values())
    groups = sum(scale.numel() for _, scale, _ in run.matrices.values())
    shapes = 16 * len(run.matrices)
    assert sizes[QUANTIZED].weights == matrices
    assert sizes[QUANTIZED].size == matrices // 4 + groups * 4 + groups // 4 + shapes
    assert sizes[QUANTIZED].original == 2 * matrices
    assert sizes[EMBEDDINGS].size == sizes[EMBEDDINGS].original == 2 * 2 * 280 * 128
    assert sizes[OTHERS].weights == 5 * 128
    files = {n: t.nbytes for f in tmp_path.glob("*.safetensors") for n, t in load_file(f).items()}
    assert sum(size.size for size in sizes.values()) == sum(files.values())
