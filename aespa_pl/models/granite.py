"""Granite is a LLaMA with four multipliers: of embeddings, residual branches, scores and logits."""

from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from aespa_pl.models.llama import LlamaFamily


class GraniteFamily(LlamaFamily):
    """Adapts Granite; the multiplier of the scores comes with each call of the attention."""

    title = "Granite"
    model_types = ("granite",)

    def residual_factor(self, config: PreTrainedConfig) -> float:
        """Return the residual multiplier."""
        return float(config.residual_multiplier)

    def embedded(self, model: PreTrainedModel, ids: Tensor) -> Tensor:
        """Return the multiplied embeddings."""
        return super().embedded(model, ids) * cast(float, model.config.embedding_multiplier)

    def head(self, model: PreTrainedModel, hidden: Tensor) -> Tensor:
        """Run final norm and head, and divide the logits."""
        config: Any = model.config
        return super().head(model, hidden) / cast(float, config.logits_scaling)
