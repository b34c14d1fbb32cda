"""The tests of the statistics collect those of a tiny model of each kind, in float64."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedTextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from aespa_pl.algorithm.objectives import Precision
from aespa_pl.calibration.collector import StatisticsCollector
from aespa_pl.calibration.observe import Observation, observing
from aespa_pl.calibration.statistics import BlockStatistics, Hessian
from aespa_pl.models import family_of
from aespa_pl.models.family import BlockLayout, Family
from aespa_pl.models.observed import Attention

LENGTH, SEGMENTS, HEADS, HEAD_SIZE = 7, 8, 4, 6
WIDTH = HEADS * HEAD_SIZE
LLAMA = {
    "hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": 20, "vocab_size": 50,
    "num_hidden_layers": 1, "max_position_embeddings": 16,
}  # fmt: skip
PLAIN = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def opt() -> PreTrainedModel:
    return OPTForCausalLM(
        OPTConfig(
            hidden_size=WIDTH, num_attention_heads=HEADS, ffn_dim=20, vocab_size=50, num_hidden_layers=1,
            max_position_embeddings=16, word_embed_proj_dim=WIDTH, dropout=0.0, attention_dropout=0.0,
        )
    )  # fmt: skip


def bloom() -> PreTrainedModel:
    return BloomForCausalLM(BloomConfig(hidden_size=WIDTH, n_head=HEADS, n_layer=1, vocab_size=50))


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**LLAMA, num_key_value_heads=HEADS))


def grouped() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**LLAMA, num_key_value_heads=2))


def qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**LLAMA, num_key_value_heads=2, head_dim=HEAD_SIZE))


def window() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**LLAMA, num_key_value_heads=2, sliding_window=3))


def granite() -> PreTrainedModel:
    multipliers = {"residual_multiplier": 0.3, "attention_multiplier": 0.6}
    return GraniteForCausalLM(GraniteConfig(**LLAMA, **multipliers))


def phi3() -> PreTrainedModel:
    """Rotate 4 of the 6 columns of a head."""
    return Phi3ForCausalLM(Phi3Config(**LLAMA, **PLAIN, partial_rotary_factor=0.7))


def smollm3() -> PreTrainedModel:
    """Have no RoPE in the block."""
    return SmolLM3ForCausalLM(SmolLM3Config(**LLAMA, **PLAIN, no_rope_layers=[0]))


def ministral3() -> PreTrainedModel:
    """Multiply queries from position 3 on."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.5}
    rope["original_max_position_embeddings"] = 3
    return Ministral3ForCausalLM(
        Ministral3Config(**LLAMA, **PLAIN, num_key_value_heads=2, head_dim=HEAD_SIZE, rope_parameters=rope)
    )


def ernie() -> PreTrainedModel:
    """Rotate neighbours."""
    return Ernie4_5ForCausalLM(Ernie4_5Config(**LLAMA, num_key_value_heads=2, head_dim=HEAD_SIZE))


def glm4() -> PreTrainedModel:
    """Rotate neighbours among 4 of the 6 columns of a head."""
    return Glm4ForCausalLM(
        Glm4Config(
            **LLAMA, **PLAIN, num_key_value_heads=2, head_dim=HEAD_SIZE, partial_rotary_factor=0.7,
            attention_bias=False,
        )
    )  # fmt: skip


def hunyuan() -> PreTrainedModel:
    """Normalize queries and keys after RoPE."""
    return HunYuanDenseV1ForCausalLM(HunYuanDenseV1Config(**LLAMA, num_key_value_heads=2, head_dim=HEAD_SIZE))


def gemma3() -> PreTrainedModel:
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **LLAMA,
            **PLAIN,
            num_key_value_heads=2,
            head_dim=HEAD_SIZE,
            query_pre_attn_scalar=5,
            layer_types=["full_attention"],
        )
    )


def gemma4() -> PreTrainedModel:
    """Normalize values as well."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return Gemma4UnifiedForCausalLM(
        Gemma4UnifiedTextConfig(
            **LLAMA,
            **PLAIN,
            num_key_value_heads=2,
            head_dim=HEAD_SIZE,
            global_head_dim=HEAD_SIZE,
            layer_types=["full_attention"],
            rope_parameters={"full_attention": rope, "sliding_attention": rope},
        )
    )


def olmo2() -> PreTrainedModel:
    return Olmo2ForCausalLM(Olmo2Config(**LLAMA, **PLAIN, num_key_value_heads=2))


def hybrid() -> PreTrainedModel:
    """Have gated attention, and rotate 4 of the 6 columns of a head."""
    return Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            **LLAMA,
            num_key_value_heads=2,
            head_dim=HEAD_SIZE,
            partial_rotary_factor=0.7,
            layer_types=["full_attention"],
        )
    )


MODELS = [opt, bloom, llama, grouped, window, qwen3, granite, phi3]


def make(model_of: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    model = model_of().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.4 if parameter.dim() > 1 else 1.0))
    return model.requires_grad_(requires_grad=False)


def first_block(model: PreTrainedModel) -> tuple[Family, nn.Module, BlockLayout]:
    family = family_of(model.config)
    return family, model.get_submodule(family.blocks_path)[0], family.layout(model.config)


def run_through(model: PreTrainedModel, words: Tensor) -> Observation:
    """Return what the first block does with some segments, everything that can be observed."""
    family, block, layout = first_block(model)
    attention = partial(family.observe_attention, model, block)
    with observing(block, layout.groups, residuals=True, attention=attention) as seen:
        hidden, _ = family.embed(model, words)
        family.run_block(block, hidden, family.arguments(model, hidden))
    return seen


def collect(
    model: PreTrainedModel,
    ids: Tensor,
    batch_size: int,
    before_the_end: Callable[[StatisticsCollector], None] = lambda _: None,
    precision: Precision = "float32",
) -> tuple[BlockStatistics, list[Attention], Tensor]:
    """Return the statistics, what the attention did, and its input ``[tokens, d]``.

    The input is seen by a hook of its own.
    """
    family, block, layout = first_block(model)
    seen: list[Attention] = []
    inputs: list[Tensor] = []
    collector = StatisticsCollector(layout, value=True, query_key=True, precision=precision)
    module = block.get_submodule(layout.groups[0].projections[0].module)
    handle = module.register_forward_pre_hook(lambda _, x: inputs.append(x[0]))
    for part in ids.split(batch_size):
        observation = run_through(model, part)
        collector.add(observation)
        seen.append(observation.attention)
    handle.remove()
    before_the_end(collector)
    statistics = collector.finish(family.norm_weights(block))
    return statistics, seen, torch.cat([x.flatten(0, 1) for x in inputs])


def whole(hessian: Hessian) -> Tensor:
    """Return the matrices ``[heads, d_in, d_in]`` of all heads."""
    return hessian[:]


def shared_by_all(hessian: Hessian) -> Tensor:
    """Return the one matrix ``[d_in, d_in]`` of an input group."""
    assert len(hessian) == 1
    return hessian[:][0]


def attention_statistics(statistics: BlockStatistics) -> dict[str, Tensor]:
    """Return H_V, G_Q and G_K by name."""
    return {"attended": whole(statistics.attended), "keys": statistics.g_query, "queries": statistics.g_key}


def tokens() -> Tensor:
    return torch.randint(3, 50, (SEGMENTS, LENGTH))


def assert_close(one: BlockStatistics, other: BlockStatistics) -> None:
    """Check that two blocks' statistics agree, but for their shifts."""
    for name, H in one.inputs.items():
        torch.testing.assert_close(whole(H), whole(other.inputs[name]))
    found = attention_statistics(other)
    for kind, expected in attention_statistics(one).items():
        torch.testing.assert_close(found[kind], expected)
    assert one.tokens == other.tokens
