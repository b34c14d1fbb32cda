"""Gemma 4: blocks with full attention have wider heads than others, and their keys may be values as well.

Values pass a norm without a weight before they are mixed over positions, and each block ends with a factor.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from aespa_pl.errors import UserError
from aespa_pl.models.block_kinds import FULL, attention_kinds
from aespa_pl.models.family import BlockLayout, Role
from aespa_pl.models.observed import Observer
from aespa_pl.models.relatives import Gemma3Family

UNKNOWN = {
    "hidden_size_per_layer_input": "per-layer embeddings",
    "num_kv_shared_layers": "keys and values that blocks share",
    "enable_moe_block": "experts beside a dense feed-forward network",
}
"""Parts that no family here has, by their entry of config.json, which is 0 or false without them."""


class Gemma4Family(Gemma3Family):
    """Adapts the dense models of Gemma 4 without per-layer embeddings (12B and 31B)."""

    title = "Gemma 4 (12B, 31B)"
    model_types = ("gemma4_text", "gemma4_unified_text")
    norm_offset = 0.0

    def check(self, config: PreTrainedConfig) -> None:
        """Refuse what no family has, and what Gemma 3 is refused for."""
        for name, part in UNKNOWN.items():
            if getattr(config, name, None):
                raise UserError(
                    f"model.pretrained: {part} ({name} in config.json) can't be quantized: of Gemma 4 the "
                    "12B and 31B models have none"
                )
        super().check(config)

    def sees_later(self, config: PreTrainedConfig) -> bool:
        """Return whether tokens of text see those after them; tokens of images may."""
        return bool(config.use_bidirectional_attention == "all")

    def layout(self, config: PreTrainedConfig, index: int = 0) -> BlockLayout:
        """Return the projections of a block, whose kind of attention decides on its heads."""
        own: Any = config.per_layer_config[index]
        layout = super().layout(own, index)
        inputs, output, *mlp = layout.groups
        output = replace(output, fold=None)  # a norm stands between the rows of V and what is mixed
        if config.attention_k_eq_v and attention_kinds(config)[index] == FULL:
            query, key, _ = inputs.projections
            inputs = replace(inputs, projections=(query, replace(key, role=Role.VALUE)))
        return replace(layout, groups=(inputs, output, *mlp), values_normed=True)

    @contextmanager
    def observe_attention(self, model: PreTrainedModel, block: nn.Module, report: Observer) -> Iterator[None]:
        """Call ``report`` for each batch, with what the norm divides values by."""
        seen: dict[str, Any] = {}
        attention: Any = block.get_submodule("self_attn")

        def keep_scale(_module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
            heads = output.unflatten(-1, (-1, attention.head_dim)).float()  # [B, L, n_kv, d_h]
            inverse = (heads.square().mean(-1) + attention.v_norm.eps).rsqrt()
            seen["value_inverse"] = inverse.transpose(1, 2)

        values = attention.k_proj if attention.v_proj is None else attention.v_proj
        with (
            values.register_forward_hook(keep_scale),
            super().observe_attention(model, block, lambda a: report(replace(a, **seen))),
        ):
            yield
