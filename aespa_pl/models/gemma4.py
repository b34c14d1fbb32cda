"""Gemma 4: blocks with full attention have wider heads than others, and their keys may be values as well.

Values pass a norm without a weight before they are mixed over positions, and each block ends with a factor.
26B has experts beside the dense network of each block. Either has norms of its own before and behind it, and
their sum passes another.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from aespa_pl.errors import UserError
from aespa_pl.models.block_kinds import FULL, attention_kinds
from aespa_pl.models.experts import ExpertMixture, taken_apart
from aespa_pl.models.family import BlockLayout, Role
from aespa_pl.models.moe import MixtureFamily
from aespa_pl.models.observed import Observer
from aespa_pl.models.relatives import AFTER, Gemma3Family

UNKNOWN = {
    "hidden_size_per_layer_input": "per-layer embeddings",
    "num_kv_shared_layers": "keys and values that blocks share",
}
"""Parts that no family here has, by their entry of config.json, which is 0 or false without them."""


class Gemma4Family(MixtureFamily, Gemma3Family):
    """Adapts the models of Gemma 4 without per-layer embeddings (12B, 26B and 31B)."""

    title = "Gemma 4 (12B, 26B, 31B)"
    model_types = ("gemma4_text", "gemma4_unified_text")
    norm_offset = 0.0
    joins_experts = True

    def check(self, config: PreTrainedConfig) -> None:
        """Refuse what no family has, and what Gemma 3 is refused for."""
        for name, part in UNKNOWN.items():
            if getattr(config, name, None):
                raise UserError(
                    f"model.pretrained: {part} ({name} in config.json) can't be quantized: of Gemma 4 the "
                    "12B, 26B and 31B models have none"
                )
        super().check(config)

    def sees_later(self, config: PreTrainedConfig) -> bool:
        """Return whether tokens of text see those after them; tokens of images may."""
        return bool(config.use_bidirectional_attention == "all")

    def has_experts(self, config: PreTrainedConfig, index: int) -> bool:
        """Return whether the blocks have experts."""
        return bool(getattr(config, "enable_moe_block", False))  # unified configurations have none

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

    def with_experts(self, config: PreTrainedConfig, dense: BlockLayout, index: int) -> BlockLayout:
        """Return the layout of a block that has experts beside the dense network."""
        first, second = ((f"{AFTER[1]}_{i}", AFTER[1]) for i in (1, 2))
        mixture = ExpertMixture(
            "experts",
            "router",
            "experts",
            config.num_experts,
            config.top_k_experts,
            residual=self.starts[1],
            input_norm=f"{self.starts[1]}_2",
            norms=second,
        )
        *groups, last = dense.groups
        down = replace(last.projections[0], norms=first)
        groups = [*groups, replace(last, projections=(down,)), *self.expert_groups(mixture)]
        return replace(dense, groups=tuple(groups), mixture=mixture)

    def unfuse(self, model: PreTrainedModel) -> None:
        """Give every expert linear layers of its own."""
        blocks: Any = model.get_submodule(self.blocks_path)
        for block in blocks if self.has_experts(model.config, 0) else ():
            block.experts = taken_apart(block.experts, self.fused, self.gated(block.experts))

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
