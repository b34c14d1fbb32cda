"""Models with gated attention, linear attention and shared experts are walked as others."""

from pathlib import Path

import torch

from aespa_pl.planning.partition import Partition
from tests.models.examples import make_model
from tests.walks import BLOCKS, same_files, shortened, walk

CORRECTED = {"input_correction": 0.5}


def test_eight_bits_give_the_logits(tmp_path: Path) -> None:
    quantized = walk("qwen3-next", tmp_path, CORRECTED | {"bits": 8})
    with torch.inference_mode():
        logits, expected = (
            model(quantized.ids, use_cache=False).logits
            for model in (quantized.exported(), quantized.original)
        )
    assert (logits - expected).square().mean() < 1e-3 * expected.var()


def test_values_behind_a_gate_are_the_same_in_several_passes(tmp_path: Path) -> None:
    whole, parts = (
        walk("qwen3.5", tmp_path / f"{heads}", CORRECTED, partition=Partition(heads=heads))
        for heads in (None, 1)
    )
    same_files(parts, whole)


def test_a_sublayer_of_linear_attention_is_trained(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make_model("qwen3.5", torch.float32)
    del model.model.layers[0]  # so that it comes first
    for index, block in enumerate(model.model.layers):
        (block.linear_attn if hasattr(block, "linear_attn") else block.self_attn).layer_idx = index
    model.config.layer_types = model.config.layer_types[1:]
    model.config.num_hidden_layers = BLOCKS
    quantized = walk(
        "qwen3.5", tmp_path, {"method": "brecq", "tuning.blocks.epochs": 1}, model=shortened(model)
    )
    assert quantized.file(0)["in_proj_qkv.integers"].max() == 3
