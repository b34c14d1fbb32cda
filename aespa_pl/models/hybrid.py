"""Qwen3-Next and Qwen3.5 mix blocks of gated attention with blocks of Gated DeltaNet.

In gated attention the rows of q_proj are query and gate of a head in turn; the sigmoid of the gate
multiplies the attention's output before o_proj. A Gated DeltaNet is a linear attention with a state: its
large projections are plain linear layers, and all that rules the state keeps its precision (convolution,
decay, norm, and the projections of decay and step, which have a row for each head; errors of the state add
up over positions). Every norm but the one inside of Gated DeltaNet adds 1 to its weight.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, cast

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_recurrent_attention_mask

from aespa_pl.models.block_kinds import FULL, LINEAR, attention_kinds
from aespa_pl.models.family import BlockLayout, Projection, Role
from aespa_pl.models.moe import Qwen3MoeFamily
from aespa_pl.models.observed import Observer

LARGE, SMALL = ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a")
"""Projections of a Gated DeltaNet that are quantized, and that are not."""
JOINED = {"qwen3_next": (("in_proj_qkvz",), ("in_proj_ba",))}
"""The same where several are one matrix."""


class HybridFamily(Qwen3MoeFamily):
    """Adapts Qwen3-Next and the text models of Qwen3.5, dense or with experts."""

    title = "Qwen3-Next, Qwen3.5 (text)"
    model_types = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
    norm_offset = 1.0
    masks: ClassVar = {FULL: create_causal_mask, LINEAR: create_recurrent_attention_mask}

    def has_experts(self, config: PreTrainedConfig, index: int) -> bool:
        """Return whether a block has experts; those of dense models have none."""
        if hasattr(config, "decoder_sparse_step"):
            return super().has_experts(config, index)
        return hasattr(config, "num_experts")

    def layout(self, config: PreTrainedConfig, index: int = 0) -> BlockLayout:
        """Return the projections of a block of either kind."""
        attention = super().layout(config, index)
        if attention_kinds(config)[index] != LINEAR:
            return replace(attention, gated=True)
        large, small = JOINED.get(config.model_type, (LARGE, SMALL))
        names, readers = (tuple(f"linear_attn.{n}" for n in some) for some in ((*large, "out_proj"), small))
        # the input of out_proj comes from a norm with a weight for all heads, and a gate behind SiLU
        return self.without_attention(config, attention, names, None, readers)

    def attention_inputs(self, config: PreTrainedConfig) -> tuple[Projection, ...]:
        """Return the projections that see the input of the attention, the gate's rows among them."""
        query, key, value = super().attention_inputs(config)
        gate = Projection("q_gate", query.module, Role.OTHER, fused=(1, 2))
        return replace(query, fused=(0, 2)), key, value, gate

    def run_block(self, block: nn.Module, hidden: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        """Run one block, with the arguments of its kind."""
        return cast(Tensor, block(hidden, **arguments[cast(str, block.block_type)]))

    @contextmanager
    def observe_attention(self, model: PreTrainedModel, block: nn.Module, report: Observer) -> Iterator[None]:
        """Call ``report`` for each batch, with the gates."""
        seen: dict[str, Any] = {}
        attention: Any = block.get_submodule("self_attn")

        def keep_gate(_module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
            gates = output.unflatten(-1, (-1, 2, attention.head_dim))[..., 1, :]  # [B, L, n_h, d_h]
            seen["gate"] = gates.sigmoid().transpose(1, 2)

        with (
            attention.q_proj.register_forward_hook(keep_gate),
            super().observe_attention(model, block, lambda a: report(replace(a, **seen))),
        ):
            yield
