"""LFM2 mixes blocks of attention with blocks of a gated short convolution.

The input projection of a convolution has the rows of two gates and of what is convolved. Both projections are
plain linear layers; the convolution, with a few weights for each channel, keeps its precision.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, cast

from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.masking_utils import create_causal_mask, create_recurrent_attention_mask

from aespa_pl.models.block_kinds import CONVOLUTION, FULL, attention_kinds
from aespa_pl.models.family import BlockLayout
from aespa_pl.models.llama import LlamaFamily


class Lfm2Family(LlamaFamily):
    """Adapts dense models of LFM2."""

    title = "LFM2 (dense)"
    model_types = ("lfm2",)
    starts = ("operator_norm", "ffn_norm")
    output = "out_proj"
    mlp = ("feed_forward", "w1", "w3", "w2")
    final_norm = "embedding_norm"
    head_norms = ("q_layernorm", "k_layernorm")
    masks: ClassVar = {FULL: create_causal_mask, CONVOLUTION: create_recurrent_attention_mask}

    def layout(self, config: PreTrainedConfig, index: int = 0) -> BlockLayout:
        """Return the projections of a block of either kind."""
        attention = super().layout(config, index)
        if attention_kinds(config)[index] != CONVOLUTION:
            return attention
        # the input of out_proj is a product of two parts of in_proj's outputs
        return self.without_attention(config, attention, ("conv.in_proj", "conv.out_proj"), None)

    def run_block(self, block: nn.Module, hidden: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        """Run one block, with the arguments of its kind."""
        return cast(Tensor, block(hidden, **arguments[FULL if block.is_attention_layer else CONVOLUTION]))
