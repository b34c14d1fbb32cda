"""LFM2 mixes blocks of attention with blocks of a gated short convolution.

The input projection of a convolution has the rows of two gates and of what is convolved. Both projections are
plain linear layers; the convolution, with a few weights for each channel, keeps its precision.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, cast

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_recurrent_attention_mask

from aespa_pl.models.block_kinds import CONVOLUTION, FULL, attention_kinds
from aespa_pl.models.family import BlockLayout, FoldIntoNorm, FoldIntoRows, Projection
from aespa_pl.models.llama import LlamaFamily


class Lfm2Family(LlamaFamily):
    """Adapts dense models of LFM2."""

    title = "LFM2 (dense)"
    model_types = ("lfm2",)
    starts = ("operator_norm", "ffn_norm")
    head_norms = ("q_layernorm", "k_layernorm")
    masks: ClassVar = {FULL: create_causal_mask, CONVOLUTION: create_recurrent_attention_mask}

    def layout(self, config: PreTrainedConfig, index: int = 0) -> BlockLayout:
        """Return the projections of a block of either kind."""
        before, after = self.starts
        inputs = self.attention_inputs(config)
        output = Projection("out_proj", "self_attn.out_proj", residual=before)
        own_values = config.num_attention_heads == config.num_key_value_heads
        fold = FoldIntoRows("v_proj") if own_values else None
        if attention_kinds(config)[index] == CONVOLUTION:
            inputs = (Projection("in_proj", "conv.in_proj"),)
            output = Projection("out_proj", "conv.out_proj", residual=before)
            fold = None  # its input is a product of two parts of in_proj's outputs
        ups = tuple(Projection(name, f"feed_forward.{name}") for name in ("w1", "w3"))
        down = Projection("w2", "feed_forward.w2", residual=after)
        return BlockLayout.of(
            config,
            (inputs, FoldIntoNorm(before)),
            ((output,), fold),
            (ups, FoldIntoNorm(after)),
            ((down,), FoldIntoRows("w3")),  # its input is act(w1 x) * w3 x
        )

    def run_block(self, block: nn.Module, hidden: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        """Run one block, with the arguments of its kind."""
        return cast(Tensor, block(hidden, **arguments[FULL if block.is_attention_layer else CONVOLUTION]))

    def head(self, model: PreTrainedModel, hidden: Tensor) -> Tensor:
        """Run final norm and head."""
        return cast(Tensor, model.lm_head(model.model.embedding_norm(hidden)))
