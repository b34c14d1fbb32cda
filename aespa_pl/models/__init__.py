"""Give each model family one adapter, which is the only place that knows the family's name.

Read ``family.py`` first: it is the interface. ``pretrained.py`` reads weights block by block,
``weights.py`` takes projections out of a block and folds zeta into it.
"""

from transformers import PreTrainedConfig

from aespa_pl.errors import UserError
from aespa_pl.models.bloom import BloomFamily
from aespa_pl.models.family import Family
from aespa_pl.models.gemma4 import Gemma4Family
from aespa_pl.models.granite4 import Granite4Family, GraniteMoeFamily
from aespa_pl.models.hybrid import HybridFamily
from aespa_pl.models.latent import LatentFamily
from aespa_pl.models.lfm2 import Lfm2Family
from aespa_pl.models.llama import LlamaFamily
from aespa_pl.models.moe import (
    ErnieMoeFamily,
    Glm4MoeFamily,
    GptOssFamily,
    HunyuanMoeFamily,
    Lfm2MoeFamily,
    MiniMaxFamily,
    MixtralFamily,
    OlmoeFamily,
    Qwen3MoeFamily,
)
from aespa_pl.models.multimodal import MULTIMODAL
from aespa_pl.models.opt import OptFamily
from aespa_pl.models.relatives import (
    ErnieFamily,
    Gemma2Family,
    Gemma3Family,
    Glm4Family,
    GlmFamily,
    GraniteFamily,
    HunyuanFamily,
    OlmoFamily,
    Phi3Family,
)

FAMILIES: tuple[Family, ...] = (
    OptFamily(), BloomFamily(), LlamaFamily(), GraniteFamily(), Phi3Family(), Gemma2Family(), Gemma3Family(),
    Gemma4Family(), OlmoFamily(), GlmFamily(), Glm4Family(), ErnieFamily(), HunyuanFamily(), Lfm2Family(),
    Qwen3MoeFamily(), MixtralFamily(), OlmoeFamily(), Glm4MoeFamily(), ErnieMoeFamily(), HunyuanMoeFamily(),
    Lfm2MoeFamily(), HybridFamily(), GptOssFamily(), MiniMaxFamily(), LatentFamily(), GraniteMoeFamily(),
    Granite4Family(),
)  # fmt: skip

MODEL_TYPES: tuple[str, ...] = tuple(name for family in FAMILIES for name in family.model_types)
"""The ``model_type`` values in config.json that can be quantized."""

MISSING = {
    **dict.fromkeys(("gemma3n", "gemma3n_text"), "per-layer embeddings"),
    "phi4_multimodal": "its encoders of images and sound",
    "exaone4_5": "its image encoder",
    "olmo_hybrid": "linear attention",
    "granitemoeshared": "its shared expert",
    **dict.fromkeys(("ernie4_5_vl_moe", "glm4v", "glm4v_moe", "qwen3_vl_moe"), "its image encoder"),
}
"""Parts that no family here has, by the ``model_type`` of models that a user may take for supported."""


def family_of(config: PreTrainedConfig) -> Family:
    """Return the family of a model; raise UserError where there is none, or it refuses the configuration."""
    for family in FAMILIES:
        if config.model_type in family.model_types:
            family.check(config)
            return family
    raise unknown_model_type(config.model_type)


def unknown_model_type(given: object, whole: str | None = None) -> UserError:
    """Return the error for a ``model_type`` that no family has; ``whole`` is that of a multimodal model."""
    expected = MODEL_TYPES if whole is not None else (*MODEL_TYPES, *MULTIMODAL)
    if given is None:
        return UserError(
            f"model.pretrained: config.json has no model_type: expected one of {', '.join(expected)}"
        )
    part = f" ({MISSING[given]})" if isinstance(given, str) and given in MISSING else ""
    where = "config.json" if whole is None else f"the text_config of a {whole} in config.json"
    return UserError(
        f"model.pretrained: model_type {given!r} in {where} is not supported{part}: "
        f"expected one of {', '.join(expected)}"
    )
