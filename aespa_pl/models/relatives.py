"""LLaMA's structure with a difference: the families that are said in a few lines.

A norm in another place, a multiplier, a fused matrix: each class says what differs from LLaMA, and why.
"""

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from aespa_pl.errors import UserError
from aespa_pl.models.family import QKV, Projection
from aespa_pl.models.llama import LlamaFamily

AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")
"""Norms behind the sublayers of a block, where it has them."""


class GraniteFamily(LlamaFamily):
    """Adapts Granite, which multiplies embeddings, residual branches, scores and logits.

    The multiplier of the scores comes with each call of the attention.
    """

    title = "Granite"
    model_types = ("granite",)

    def residual_factor(self, config: PreTrainedConfig) -> float:
        """Return the residual multiplier."""
        return float(config.residual_multiplier)

    def embed(self, model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, Mapping[str, Any]]:
        """Embed the tokens, and multiply."""
        hidden, arguments = super().embed(model, ids)
        return hidden * model.config.embedding_multiplier, arguments

    def head(self, model: PreTrainedModel, hidden: Tensor) -> Tensor:
        """Run final norm and head, and divide the logits."""
        return super().head(model, hidden) / cast(float, model.config.logits_scaling)


class OlmoFamily(LlamaFamily):
    """Adapts OLMo 2 and 3, whose norms of queries and keys run over all heads together, and EXAONE 4.

    They have a norm after each sublayer and none before. The projections read the residual stream itself, so
    no zeta of their inputs can be folded.
    """

    title = "OLMo 2, OLMo 3, EXAONE 4"
    model_types = ("olmo2", "olmo3", "exaone4")
    starts: ClassVar = ("self_attn.q_proj", "mlp.gate_proj")
    norms_before = False
    norms_after = AFTER

    def rotates(self, attention: nn.Module) -> bool:
        """Return whether an attention rotates: in a mixed EXAONE 4 only those with a window do."""
        known: Any = attention
        mixed = known.config.model_type == "exaone4" and known.sliding_window is not None
        return not mixed or bool(known.is_sliding)


class Phi3Family(LlamaFamily):
    """Adapts Phi-3 and Phi-4: Q, K and V are one matrix, gate and up another, rows after rows."""

    title = "Phi-3, Phi-4"
    model_types = ("phi3",)
    fused_mlp = "gate_up_proj"

    def attention_inputs(self, config: PreTrainedConfig) -> tuple[Projection, ...]:
        """Return the parts of the first fused matrix."""
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        query, key = size * config.num_attention_heads, size * config.num_key_value_heads
        bounds = pairwise(accumulate((query, key, key), initial=0))
        return tuple(
            Projection(f"{role[0]}_proj", "self_attn.qkv_proj", role, rows=rows)
            for role, rows in zip(QKV, bounds, strict=True)
        )


class GlmFamily(LlamaFamily):
    """Adapts GLM-4: gate and up are one matrix, and RoPE turns neighbours in a part of each head."""

    title = "GLM-4"
    model_types: ClassVar[tuple[str, ...]] = ("glm",)
    fused_mlp = "gate_up_proj"
    rotates_neighbours = True


class Glm4Family(GlmFamily):
    """Adapts GLM-4-0414, which has a norm behind each sublayer as well."""

    title = "GLM-4-0414"
    model_types = ("glm4",)
    norms_after = ("post_self_attn_layernorm", "post_mlp_layernorm")


class ErnieFamily(LlamaFamily):
    """Adapts the dense models of ERNIE 4.5, in which RoPE turns neighbours."""

    title = "ERNIE 4.5 (dense)"
    model_types = ("ernie4_5",)
    rotates_neighbours = True


class HunyuanFamily(LlamaFamily):
    """Adapts the dense models of Hunyuan, in which norms on query and key heads come after RoPE."""

    title = "Hunyuan (dense)"
    model_types = ("hunyuan_v1_dense",)
    head_norms = ("query_layernorm", "key_layernorm")
    rotates_before_norms = True

    def check(self, config: PreTrainedConfig) -> None:
        """Refuse a configuration without the size of a head, and what every family refuses."""
        if config.head_dim is None:
            raise UserError(
                "model.pretrained: config.json has no head_dim, which transformers needs for this model: add "
                "it (attention_head_dim where that is there, else hidden_size / num_attention_heads)"
            )
        super().check(config)


class Gemma3Family(LlamaFamily):
    """Adapts the text models of Gemma 3, with two kinds of RoPE, and norms on query and key heads.

    Norms stand before and after each sublayer, and add 1 to their weights. The embeddings are multiplied by
    ``sqrt(d)``. The scale of the scores comes with each call of the attention.
    """

    title = "Gemma 3 (text)"
    model_types: ClassVar[tuple[str, ...]] = ("gemma3_text",)
    starts: ClassVar[tuple[str, str]] = ("input_layernorm", "pre_feedforward_layernorm")
    norms_after = AFTER
    norm_offset = 1.0
    needs_bos = True  # without it the perplexity of Gemma 3 270M on WikiText-2 is 42.8 in place of 18.5

    def check(self, config: PreTrainedConfig) -> None:
        """Refuse what a LLaMA is refused for, and attention in both directions."""
        super().check(config)
        if self.sees_later(config):
            raise UserError(
                "model.pretrained: use_bidirectional_attention in config.json is not supported: only "
                "models that generate text are quantized"
            )

    def sees_later(self, config: PreTrainedConfig) -> bool:
        """Return whether tokens of text see those after them."""
        return bool(config.use_bidirectional_attention)

    def restore_buffers(self, model: PreTrainedModel, device: torch.device) -> None:
        """Compute RoPE's frequencies, and the factor of the embeddings."""
        super().restore_buffers(model, device)
        embedding: Any = model.get_input_embeddings()
        embedding.embed_scale = torch.tensor(embedding.scalar_embed_scale, device=device)

    def head(self, model: PreTrainedModel, hidden: Tensor) -> Tensor:
        """Run final norm and head, and cap the logits where the model does."""
        logits, cap = super().head(model, hidden), model.config.final_logit_softcapping
        return logits if cap is None else cast(Tensor, (logits / cap).tanh() * cap)


class Gemma2Family(Gemma3Family):
    """Adapts Gemma 2, which caps scores and logits by ``c tanh(s / c)``, and has no norms on heads."""

    title = "Gemma 2"
    model_types = ("gemma2",)

    def forms_probabilities(self, config: PreTrainedConfig) -> bool:
        """Return True, because no fused kernel caps scores."""
        return True
