"""Gemma 2 and 3 have norms before and after each sublayer, and add 1 to the weight of every norm.

The embeddings are multiplied by ``sqrt(d)``. Gemma 2 caps scores and logits by ``c tanh(s / c)``; Gemma 3
has norms on query and key heads, and two kinds of RoPE. Both have their own scale of the scores, which
comes with each call of the attention.
"""

from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from aespa_pl.errors import UserError
from aespa_pl.models.llama import LlamaFamily


class Gemma3Family(LlamaFamily):
    """Adapts the text models of Gemma 3."""

    title = "Gemma 3 (text)"
    model_types = ("gemma3_text",)
    starts: ClassVar[tuple[str, str]] = ("input_layernorm", "pre_feedforward_layernorm")
    norms_after = True
    norm_offset = 1.0

    def check(self, config: PreTrainedConfig) -> None:
        """Refuse what a LLaMA is refused for, and attention in both directions.

        Raises:
            UserError: ``use_bidirectional_attention`` is set.
        """
        super().check(config)
        if config.use_bidirectional_attention:
            raise UserError(
                "model.pretrained: use_bidirectional_attention in config.json is not supported: only "
                "models that generate text are quantized"
            )

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
    """Adapts Gemma 2."""

    title = "Gemma 2"
    model_types = ("gemma2",)
    forms_probabilities = True  # no fused kernel caps scores
