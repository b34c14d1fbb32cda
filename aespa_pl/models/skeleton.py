"""Make the model that a configuration describes, without weights, and refuse one that can't run."""

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from aespa_pl.errors import UserError
from aespa_pl.models import family_of
from aespa_pl.models.family import Family

MOST_BLOCKS = 1000
"""Largest number of blocks. The deepest models have below 200, and the skeleton takes 5 ms a block."""
COUNTS = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")


def skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """Return the model of a configuration without weights: all on the meta device."""
    config = copy.deepcopy(config)
    config.use_cache = False
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    family_of(config).unfuse(model)
    return cast(PreTrainedModel, model.eval().requires_grad_(requires_grad=False))


def refuse_unsound(config: PreTrainedConfig, family: Family) -> None:
    """Refuse a configuration that the library reads, but whose model can't be made or can't run.

    The library checks few of a configuration's values. So its model is made, and its first block
    run, on the meta device: that takes no memory and finds what the library itself stumbles over.
    """
    for name in COUNTS:
        if (given := getattr(config, name)) < 1:
            raise UserError(f"model.pretrained: {name} in config.json is {given}: expected 1 or more")
    if config.num_hidden_layers > MOST_BLOCKS:
        raise UserError(
            f"model.pretrained: num_hidden_layers in config.json is {config.num_hidden_layers}: "
            f"expected {MOST_BLOCKS} or less"
        )
    try:
        _try(config, family)
    except Exception as error:  # the library's models raise whatever their parts raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            "model.pretrained: transformers can't run the model that config.json describes "
            f"({reason}): copy config.json from the model's origin"
        ) from error


def _try(config: PreTrainedConfig, family: Family) -> None:
    """Run the first block of each layout, and the head, on two tokens without values."""
    model, layouts = skeleton(config), family.layouts(config)
    blocks = list(cast(nn.Module, model.get_submodule(family.blocks_path)).children())
    firsts = {layout: layouts.index(layout) for layout in layouts}
    for layout, index in firsts.items():
        for projection in layout.projections:
            rows, columns = blocks[index].get_parameter(f"{projection.module}.weight").shape
            if not rows * columns:
                raise ValueError(f"{projection.name} is {rows} x {columns}")
        if layout.heads % (keys := layout.key_value_heads):
            raise ValueError(f"{layout.heads} query heads can't share {keys} key/value heads")
    positions = family.positions(config)
    if positions is not None and positions < 2:
        raise ValueError(f"max_position_embeddings is {positions}")
    hidden = torch.zeros(1, 2, config.hidden_size)  # [B, L, d]
    # Masks and rotations are made on the CPU: kinds of RoPE look at the values of positions.
    family.restore_buffers(model, hidden.device)
    arguments = _without_values(family.arguments(model, hidden))
    output = hidden.to("meta")
    for index in firsts.values():
        output = family.run_block(blocks[index], output, arguments)
    family.head(model, output)


def _without_values(value: Any) -> Any:
    """Return a block's arguments with all tensors on the meta device."""
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, dict):
        return {name: _without_values(inner) for name, inner in value.items()}
    return tuple(map(_without_values, value)) if isinstance(value, tuple) else value
