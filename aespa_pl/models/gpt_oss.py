"""gpt-oss has experts with biases and a clamped activation, and sinks beside the scores of the attention.

Its files hold all experts in one tensor, columns first, with the rows of gate and up in turn. Published
models have their experts in MXFP4; only copies in bfloat16 can be quantized.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedConfig

from aespa_pl.errors import UserError
from aespa_pl.models.moe import MixtureFamily
from aespa_pl.models.parts import NAME, Fused, Part


class GptOssFamily(MixtureFamily):
    """Adapts gpt-oss."""

    title = "gpt-oss"
    model_types = ("gpt_oss",)
    forms_probabilities = True  # no fused kernel has sinks
    fused: ClassVar = Fused(interleaved=True, transposed=True)
    router: ClassVar = "mlp.router"
    half_rotations = True
    linear_in_up: ClassVar = False  # up is clamped, and 1 is added to it

    def check(self, config: PreTrainedConfig) -> None:
        """Refuse experts in MXFP4, and what every family refuses.

        Raises:
            UserError: The model is quantized already.
        """
        other = getattr(config, "quantization_config", None)
        if isinstance(other, dict) and other.get("quant_method") == "mxfp4":
            raise UserError(
                "model.pretrained: its experts are in MXFP4 already: give a copy in bfloat16, such as "
                "transformers saves after loading with Mxfp4Config(dequantize=True)"
            )
        super().check(config)

    def gated(self, fused: Any) -> Callable[[Tensor, Tensor], Tensor]:
        """Return what joins the outputs of gate and up."""
        limit, alpha = float(fused.limit), float(fused.alpha)

        def gated(gate: Tensor, up: Tensor) -> Tensor:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return (up + 1) * (gate * (gate * alpha).sigmoid())

        return gated

    def places(self, name: str) -> tuple[tuple[str, Part | None], ...]:
        """Return the tensor of all experts that an expert's tensor lies in."""
        return (self.fused.place_of(name),) if NAME.fullmatch(name) else ((name, None),)
