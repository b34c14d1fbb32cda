"""OLMo 2, OLMo 3 and EXAONE 4 have LLaMA's sublayers, with a norm after each and none before.

The projections read the residual stream itself, so no zeta of their inputs can be folded.
"""

from typing import Any, ClassVar

from torch import nn

from aespa_pl.models.llama import LlamaFamily


class OlmoFamily(LlamaFamily):
    """Adapts OLMo 2 and 3, whose norms of queries and keys run over all heads together, and EXAONE 4."""

    title = "OLMo 2, OLMo 3, EXAONE 4"
    model_types = ("olmo2", "olmo3", "exaone4")
    starts: ClassVar[tuple[str, str]] = ("self_attn.q_proj", "mlp.gate_proj")
    norms_before = False
    norms_after = True

    def rotates(self, attention: nn.Module) -> bool:
        """Return whether an attention rotates: in a mixed EXAONE 4 only those with a window do."""
        known: Any = attention
        mixed = known.config.model_type == "exaone4" and known.sliding_window is not None
        return not mixed or bool(known.is_sliding)
