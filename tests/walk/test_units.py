"""A block whose sublayers are trained one after the other."""

from pathlib import Path

import torch
from torch import nn

from aespa_pl.algorithm.quantizer import QuantizedWeight
from aespa_pl.models.family import BlockLayout, InputGroup, Projection
from aespa_pl.tuning.tune import Tuned
from aespa_pl.tuning.weights import TunableBlock
from aespa_pl.walk.block_tuner import read_unit, write_unit
from tests.walks import walk


def tunable() -> TunableBlock:
    block = nn.ModuleDict(
        {"layer": nn.Linear(4, 2), "norm": nn.LayerNorm(4), "router": nn.Linear(4, 3, bias=False)}
    )
    layout = BlockLayout((InputGroup("input", (Projection("layer", "layer"),), None),), 1, 1, 2)
    integers = torch.randint(4, (2, 4), dtype=torch.uint8)
    weight = QuantizedWeight(integers, (torch.rand(2, 1) + 0.5).half().float(), torch.ones(2, 1), 2)
    return TunableBlock(block, layout, {"layer": weight}, {})


def test_all_that_the_first_unit_has_learned_is_there_after_an_interruption(tmp_path: Path) -> None:
    """Also a router, which is not quantized but takes the inverse of factors in its norm."""
    learned, again = tunable(), tunable()
    found = Tuned([dict(learned.weights)], 1.0, 0.5, epoch=1, finite=True, changed=0.0)
    write_unit(tmp_path / "unit.safetensors", learned, found)
    weights, finite, epoch = read_unit(tmp_path / "unit.safetensors", again)
    assert (finite, epoch) == (True, 1)
    assert torch.equal(weights["layer"].weight(), learned.weights["layer"].weight())
    layer = again.block.get_parameter("layer.weight")
    assert torch.equal(layer, learned.weights["layer"].weight())
    for name in ("layer.bias", "norm.weight", "norm.bias", "router.weight"):
        assert torch.equal(again.block.get_parameter(name), learned.block.get_parameter(name)), name


def test_a_sublayer_that_is_kept_whole_leaves_the_block_one_unit(tmp_path: Path) -> None:
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    changes = {"method": "brecq", "tuning.blocks.epochs": 1, "bits_of": dict.fromkeys(names, 16)}
    quantized = walk("llama", tmp_path, changes)
    assert int(quantized.file(0)["up_proj.integers"].max()) == 3
    state, original = quantized.exported().state_dict(), quantized.original.state_dict()
    name = f"{quantized.blocks_path}.0.self_attn.o_proj.weight"
    torch.testing.assert_close(state[name], original[name])
