"""Phi-3 and Phi-4 have LLaMA's structure with fused matrices: Q, K and V in one, gate and up in another."""

from collections.abc import Iterator
from itertools import accumulate, pairwise

from transformers import PreTrainedConfig

from aespa_pl.models.family import Projection
from aespa_pl.models.llama import QKV, LlamaFamily


class Phi3Family(LlamaFamily):
    """Adapts Phi-3 and Phi-4: the rows of a fused matrix are one projection after the other."""

    title = "Phi-3, Phi-4"
    model_types = ("phi3",)

    def attention_inputs(self, config: PreTrainedConfig) -> tuple[Projection, ...]:
        """Return the parts of the first fused matrix."""
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        query, key = size * config.num_attention_heads, size * config.num_key_value_heads
        return tuple(
            Projection(f"{role[0]}_proj", "self_attn.qkv_proj", role, rows=rows)
            for role, rows in zip(QKV, _blocks(query, key, key), strict=True)
        )

    def mlp_inputs(self, config: PreTrainedConfig) -> tuple[Projection, ...]:
        """Return the parts of the second fused matrix."""
        size = config.intermediate_size
        return tuple(
            Projection(f"{name}_proj", "mlp.gate_up_proj", rows=rows)
            for name, rows in zip(("gate", "up"), _blocks(size, size), strict=True)
        )


def _blocks(*sizes: int) -> Iterator[tuple[int, int]]:
    """Return begin and end of blocks of rows, one after the other."""
    return pairwise(accumulate(sizes, initial=0))
