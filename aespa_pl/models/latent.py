"""GLM-4.7 Flash, DeepSeek V2 and V3 have multi-head latent attention.

Two short vectors of a token are read off the residual stream. Behind a norm each, one becomes the queries of
all heads, the other their keys and values; a small key with RoPE, which all heads share, comes with it. The
matrix of keys and values (kv_b_proj) keeps its precision: it has below 1 % of a model's weights, and engines
split it in two and turn one of them over, so groups of its columns would be groups no longer. Small models of
DeepSeek V2 make queries without the short vector.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from aespa_pl.models.experts import SPARSE
from aespa_pl.models.family import BlockLayout, FoldIntoNorm, InputGroup, Projection
from aespa_pl.models.moe import MixtureFamily
from aespa_pl.models.observed import Observer


class LatentFamily(MixtureFamily):
    """Adapts models with latent attention, experts and a shared one; the first blocks are dense.

    The routers of all but DeepSeek V2 have sigmoids, and a correction as GLM-4.5's.
    """

    title = "GLM-4.7 Flash, DeepSeek V2 and V3"
    model_types = ("glm4_moe_lite", "deepseek_v2", "deepseek_v3")
    shared = "shared_experts"
    exact: ClassVar[tuple[str, ...]] = ("e_score_correction_bias",)

    def has_experts(self, config: PreTrainedConfig, index: int) -> bool:
        """Return whether a block has experts; some configurations list them."""
        kinds = getattr(config, "mlp_layer_types", None)
        return super().has_experts(config, index) if kinds is None else kinds[index] == SPARSE

    def layout(self, config: PreTrainedConfig, index: int = 0) -> BlockLayout:
        """Return the projections of a block."""
        short = config.q_lora_rank is not None
        first = ("self_attn.q_a_proj" if short else "self_attn.q_proj", "self_attn.kv_a_proj_with_mqa")
        usual = super().layout(config, index)
        found = self.without_attention(config, usual, (*first, "self_attn.o_proj"), None)
        queries = InputGroup(
            "query_input",
            (Projection("q_b_proj", "self_attn.q_b_proj"),),
            FoldIntoNorm("self_attn.q_a_layernorm"),
        )
        inputs, *others = found.groups
        groups = (inputs, *((queries,) if short else ()), *others)
        return replace(found, groups=groups, head_dim=int(config.qk_head_dim), latent=True)

    def forms_probabilities(self, config: PreTrainedConfig) -> bool:
        """Return whether keys and values differ in size, for which a CPU has no fused kernel."""
        return bool(config.v_head_dim != config.qk_head_dim)

    @contextmanager
    def observe_attention(self, model: PreTrainedModel, block: nn.Module, report: Observer) -> Iterator[None]:
        """Report nothing, because no objective of these blocks needs queries and keys."""
        yield
