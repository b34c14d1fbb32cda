"""Granite 4 without experts mixes blocks of attention with blocks of Mamba 2, or has attention alone.

The input projection of a Mamba block has the rows of its gate, of what is convolved and of the time steps.
Both projections are plain linear layers, and all that rules the state keeps its precision (convolution,
decay, bias of the steps, skip and norm).
"""

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_recurrent_attention_mask

from aespa_pl.errors import UserError
from aespa_pl.models.block_kinds import FULL, LINEAR, attention_kinds
from aespa_pl.models.family import BlockLayout, FoldIntoNorm
from aespa_pl.models.relatives import GraniteFamily


class Granite4Family(GraniteFamily):
    """Adapts Granite 4: its gate and up are one matrix, and its attention may have no RoPE."""

    title = "Granite 4 (no experts)"
    model_types = ("granitemoehybrid",)
    mlp = ("shared_mlp", "gate_proj", "up_proj", "output_linear")
    fused_mlp = "input_linear"
    masks: ClassVar = {FULL: create_causal_mask, LINEAR: create_recurrent_attention_mask}

    def check(self, config: PreTrainedConfig) -> None:
        """Refuse experts, and what every family refuses."""
        if config.num_local_experts:
            raise UserError(
                f"model.pretrained: num_local_experts in config.json is {config.num_local_experts}: of "
                "Granite 4 only models without experts can be quantized"
            )
        super().check(config)

    def layout(self, config: PreTrainedConfig, index: int = 0) -> BlockLayout:
        """Return the projections of a block of either kind."""
        attention = super().layout(config, index)
        if attention_kinds(config)[index] != LINEAR:
            return attention
        names = ("mamba.in_proj", "mamba.out_proj")
        return self.without_attention(config, attention, names, FoldIntoNorm("mamba.norm"))

    def mlp_width(self, config: PreTrainedConfig) -> int:
        """Return the rows of gate, and of up."""
        return int(config.shared_intermediate_size)

    def rotates(self, attention: nn.Module) -> bool:
        """Return whether the attention has RoPE."""
        return bool(cast(Any, attention).config.position_embedding_type == "rope")

    def restore_buffers(self, model: PreTrainedModel, device: torch.device) -> None:
        """Compute RoPE's frequencies, where there is RoPE."""
        if model.model.rotary_emb is not None:
            super().restore_buffers(model, device)

    def rotations(self, model: PreTrainedModel, hidden: Tensor, positions: Tensor, kind: str) -> Any:
        """Return cos and sin, or None without RoPE."""
        if model.model.rotary_emb is None:
            return None
        return super().rotations(model, hidden, positions, kind)

    def run_block(self, block: nn.Module, hidden: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        """Run one block, with the arguments of its kind."""
        return cast(Tensor, block(hidden, **arguments[cast(str, block.block_type)]))
