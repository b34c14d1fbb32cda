"""A run says before it begins what its integers become in each file."""

import re
from dataclasses import replace

import pytest
from transformers import LlamaConfig, OPTConfig

from aespa_pl.export.forecast import forecast
from aespa_pl.models import family_of
from aespa_pl.planning.shape import Shape
from aespa_pl.settings import QuantizationSettings
from tests.export.configurations import CONFIGS
from tests.models.examples import make_model


def words(width: int, intermediate: int, **options: object) -> str:
    config = LlamaConfig(
        hidden_size=width, intermediate_size=intermediate, num_attention_heads=4,
        num_hidden_layers=2, vocab_size=64,
    )  # fmt: skip
    settings = QuantizationSettings(**options)  # type: ignore[arg-type]
    return forecast(settings, Shape.of(config, family_of(config).layouts(config)), config)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # bits of the types: 4.5 = 18 bytes of 32 weights, 5.5 = 22 bytes; 4 + (32 + 4) / 64 = 4.5625
        (
            {"bits": 4, "group_size": 64},
            "4 bits, asymmetric, groups of 64: Q5_0, 5.5 bits a weight in GGUF (symmetric groups of 32 would "
            "be Q4_0, 4.5), or llama.cpp's own types by --quantization.format Q4_K_M; 4.56 in "
            "compressed-tensors",
        ),
        (
            {"bits": 4, "group_size": 32, "symmetric": True},
            "4 bits, symmetric, groups of 32: Q4_0, 4.5 bits a weight in GGUF, or llama.cpp's",
        ),
        (
            {"bits": 2, "group_size": 64},
            "2 bits, asymmetric, groups of 64: Q4_0, 4.5 bits a weight in GGUF (down to Q2_0, 2.25, where "
            "the zero points of a matrix are 1 and 2), or llama.cpp's own types by --quantization.format "
            "Q2_K; 2.53 in compressed-tensors, 4 and more in vLLM's containers",
        ),
        (
            {"bits": 2, "group_size": 64, "bits_of": {"down_proj": 8}},
            "no GGUF file, because no type of llama.cpp holds this grid (symmetric groups of 64 would",
        ),
        ({"bits": 8}, "no GGUF file, because no type of llama.cpp holds this grid (symmetric groups of 32"),
        # down_proj is a third of an MLP and has 256 columns: (4 + 3) * 1 / (4 + 9)
        ({"bits": 2}, ": Q2_K and Q4_0, "),
    ],
)  # fmt: skip
def test_bits_a_weight_in_each_file_and_a_grid_that_takes_fewer(
    options: dict[str, object], expected: str
) -> None:
    assert expected in words(192, 256, **options)


def test_the_mean_is_over_all_weights() -> None:
    # q, k, v, o: 4 * 128 * 128; gate, up: 2 * 128 * 256; down: 128 * 256, the only one with 256 columns
    mean = (4.5 * (4 * 128 * 128 + 2 * 128 * 256) + 2.625 * 128 * 256) / (4 * 128**2 + 3 * 128 * 256)
    assert f"Q2_K and Q4_0, {mean:.3g} bits a weight" in words(128, 256, bits=2)


def test_several_bits_are_counted() -> None:
    said = words(96, 160, bits=3, bits_of={"down_proj": 4})
    assert "Q4_0 and Q5_0" in said
    # 4 + (32 + 4) / columns: all take the container's bits
    assert re.search(r"; 4\.3\d in compressed-tensors with --container_bits 4$", said)
    assert said.startswith("3 to 4 bits, asymmetric")
    assert words(96, 160, bits=3, bits_of={"down_proj": 5}).endswith("with --container_bits 8")


def test_a_family_that_llama_cpp_lacks_has_no_gguf() -> None:
    config = OPTConfig(
        hidden_size=64, ffn_dim=128, num_attention_heads=4, num_hidden_layers=1, vocab_size=64,
        word_embed_proj_dim=64,
    )  # fmt: skip
    said = forecast(QuantizationSettings(), Shape.of(config, family_of(config).layouts(config)), config)
    assert "no GGUF file, because llama.cpp has no architecture for model_type opt" in said


def test_a_tokenizer_that_llama_cpp_lacks_has_no_gguf() -> None:
    config = make_model("llama").config
    shape = Shape.of(config, family_of(config).layouts(config))
    said = forecast(QuantizationSettings(), shape, config, "its tokenizer is another")
    assert "no GGUF file, because its tokenizer is another; " in said


def test_experts_with_zero_points_have_no_folder_of_integers() -> None:
    config = make_model("qwen3-moe").config
    shape = Shape.of(config, family_of(config).layouts(config))
    said = forecast(QuantizationSettings(bits=4), shape, config)
    assert "no compressed-tensors, which has no zero points of experts" in said
    symmetric = forecast(QuantizationSettings(bits=4, symmetric=True), shape, config)
    assert "in compressed-tensors" in symmetric


def test_files_that_export_refuses_are_not_promised() -> None:
    config = CONFIGS["gpt-oss"]()
    shape = Shape.of(config, family_of(config).layouts(config))
    said = forecast(QuantizationSettings(bits=4, symmetric=True), shape, config)
    assert "no compressed-tensors, which has no name for experts in one tensor" in said
    config = make_model("qwen3-moe").config
    shape = Shape.of(config, family_of(config).layouts(config))
    kept = QuantizationSettings(bits=4, symmetric=True, bits_of={"expert_1_up_proj": 16})
    assert "no compressed-tensors, which has experts either all as integers or none" in forecast(
        kept, shape, config
    )
    config = CONFIGS["qwen3.5-grouped"]()
    shape = Shape.of(config, family_of(config).layouts(config))
    assert "no GGUF file, because llama.cpp has the value heads" in forecast(
        QuantizationSettings(bits=4, group_size=64), shape, config
    )
    said = forecast(QuantizationSettings(bits=4, group_size=32), shape, config)
    assert "Q5_0, 5.5 bits a weight in GGUF (symmetric groups of 32 would be Q4_0, 4.5); 5." in said


def test_all_experts_are_one_tensor_of_llama_cpp() -> None:
    """Integers of 4 bits with zero point 8, beside others of 8 bits with 128, are in no type."""
    config = CONFIGS["mixtral"]()
    shape = Shape.of(config, family_of(config).layouts(config))
    settings = QuantizationSettings(bits=4, group_size=32, symmetric=True)
    assert ": Q4_0, 4.5 bits a weight in GGUF" in forecast(settings, shape, config)
    several = replace(settings, bits_of={"expert_0_up_proj": 8})
    assert "no GGUF file, because no type of llama.cpp holds this grid" in forecast(several, shape, config)
    kept = replace(settings, bits_of={"expert_0_up_proj": 16})
    assert "no GGUF file, because some experts keep their weights" in forecast(kept, shape, config)
    for_all = replace(settings, bits_of={"*.expert_*_up_proj": 8})
    assert ": Q4_0 and Q8_0, " in forecast(for_all, shape, config)


def test_vllm_has_projections_of_one_input_in_one_matrix() -> None:
    assert "but not for vLLM" not in words(192, 256, bits=4, bits_of={"o_proj": 16})
    said = words(192, 256, bits=4, bits_of={"k_proj": 16})
    assert "not for vLLM, because it has q_proj, k_proj, v_proj in one matrix, of which k_proj are" in said
