"""Each matrix gets the type that llama.cpp's own quantizer gives it.

``llama_cpp_types.csv`` has what ``llama_model_quantize`` of llama.cpp v0.5.0 (npm package
@node-llama-cpp/linux-x64 3.22.1, an importance matrix of ones) wrote for small random models.
``Q5_K*2 Q4_K*30`` is in the order of the blocks. Models with experts had no importance matrix, and mixtures
that depend on it are left out; the types of a shared expert were those of the others.
"""

import csv
from pathlib import Path

import pytest
from transformers import (
    BloomConfig,
    DeepseekV3Config,
    Glm4MoeConfig,
    Lfm2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from aespa_pl.models import family_of
from aespa_pl.models.llama_cpp import architecture_of
from aespa_pl.models.llama_cpp_types import Matrix, MixtureModel, matrix_of, mixture_type

with Path(__file__).with_name("llama_cpp_types.csv").open(encoding="utf-8") as file:
    ROWS = list(csv.DictReader(file))
COLUMN = {
    Matrix.VALUE: "attn_v",
    Matrix.ATTENTION_OUTPUT: "attn_output",
    Matrix.DOWN: "ffn_down",
    Matrix.KEY: "attn_k",
    Matrix.OTHER: "others",
}


KINDS: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "mixtral": MixtralConfig,
    "qwen2_moe": Qwen2MoeConfig,
    "qwen3_moe": Qwen3MoeConfig,
}


def config_of(row: dict[str, str]) -> PreTrainedConfig:
    number = {key: int(row[key]) for key in ("blocks", "hidden", "heads", "tied")}
    common = {"vocab_size": 64, "hidden_size": number["hidden"]}
    if row["architecture"] == "bloom":
        return BloomConfig(**common, n_head=number["heads"], n_layer=number["blocks"])
    experts = {}
    if row["experts"]:
        number_of = "num_local_experts" if row["architecture"] == "mixtral" else "num_experts"
        experts = {number_of: int(row["experts"])}
    return KINDS[row["architecture"]](
        **common,
        **experts,
        num_attention_heads=number["heads"],
        num_hidden_layers=number["blocks"],
        num_key_value_heads=int(row["key_value_heads"]),
        head_dim=int(row["head_dim"]),
        intermediate_size=int(row["intermediate"]),
    )


def in_order(text: str, blocks: int, mixture: str) -> list[str]:
    """Return the type of each block; ours is IQ4_NL where llama.cpp falls back to Q4_0, of the same size."""
    if mixture.startswith(("Q2_K", "Q3_K")):
        text = text.replace("Q4_0", "IQ4_NL")
    types = []
    for part in text.split():
        name, _, count = part.partition("*")
        types += [name] * int(count or blocks)
    return types


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']} {row['mixture']}")
def test_types_are_those_of_llama_cpps_own_file(row: dict[str, str]) -> None:
    config, blocks, hidden = config_of(row), int(row["blocks"]), int(row["hidden"])
    layouts, mixture = family_of(config).layouts(config), row["mixture"]
    model, layout = MixtureModel.of(layouts, architecture_of(config).name), layouts[0]
    widths = {
        Matrix.DOWN: int(row["intermediate"]),
        Matrix.ATTENTION_OUTPUT: int(row["heads"]) * int(row["head_dim"]),
    }
    for projection in layout.projections:
        matrix = matrix_of(layout, projection)
        columns = widths.get(matrix, hidden)
        found = [mixture_type(mixture, matrix, columns, model, i) for i in range(blocks)]
        expected = row[COLUMN[matrix]] or row["others"]
        assert found == in_order(expected, blocks, mixture), projection.name
    tied = row["tied"] == "1"
    embedding = mixture_type(mixture, Matrix.EMBEDDING, hidden, model, tied=tied)
    assert [embedding] == in_order(row["token_embd"], 1, mixture)
    if not tied:
        head = mixture_type(mixture, Matrix.HEAD, hidden, model)
        assert [head] == in_order(row["output"], 1, mixture)


@pytest.mark.parametrize(
    ("mixture", "expected"),
    [
        ("Q2_K", {"in_proj_qkv": "Q3_K", "in_proj_z": "Q2_K", "out_proj": "Q2_K", "o_proj": "Q3_K"}),
        ("Q3_K_M", {"in_proj_qkv": "Q5_K*2 Q4_K*10", "out_proj": "Q3_K", "o_proj": "Q4_K", "v_proj": "Q4_K"}),
        ("Q4_K_S", {"in_proj_qkv": "Q5_K*3 Q4_K*9", "v_proj": "Q5_K*1 Q4_K*3", "q_proj": "Q4_K"}),
    ],
)
def test_linear_attention_has_the_types_of_llama_cpps_own_file(
    mixture: str, expected: dict[str, str]
) -> None:
    """As in the table, of a model with 12 blocks of linear attention and 4 of attention."""
    config = Qwen3_5TextConfig(
        vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=16, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64,
    )  # fmt: skip
    check_types(config, mixture, expected)


@pytest.mark.parametrize(("mixture", "expected"), [("Q2_K", "Q4_K"), ("IQ4_XS", "Q5_K")])
def test_first_block_without_values_counts_where_files_have_one_number_of_heads(
    mixture: str, expected: str
) -> None:
    config = Qwen3NextConfig(
        vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=32, num_experts=16,
    )  # fmt: skip
    check_types(config, mixture, {"v_proj": expected})


@pytest.mark.parametrize(
    ("mixture", "expected"),
    [
        ("Q3_K_M", {"o_proj": "Q5_K", "v_proj": "Q8_0", "expert_0_down_proj": "Q4_K"}),
        ("IQ4_XS", {"o_proj": "Q5_K", "k_proj": "Q8_0", "shared_expert_down_proj": "IQ4_XS"}),
        ("IQ4_NL", {"o_proj": "Q5_K", "down_proj": "IQ4_NL"}),
        ("Q4_0", {"o_proj": "Q4_0", "down_proj": "Q4_1*2 Q4_0*1", "expert_0_down_proj": "Q4_0"}),
    ],
)
def test_eight_experts_behind_dense_blocks_have_the_types_of_llama_cpps_own_file(
    mixture: str, expected: dict[str, str]
) -> None:
    config = Glm4MoeConfig(
        vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=16, num_attention_heads=8,
        num_key_value_heads=2, head_dim=32, moe_intermediate_size=256, n_routed_experts=8,
        num_experts_per_tok=2, first_k_dense_replace=3,
    )  # fmt: skip
    check_types(config, mixture, expected)


CONVOLUTIONS = [i not in (2, 5, 8, 10, 12, 14) for i in range(16)]
"""Which blocks of LFM2 350M have convolutions."""
OUTPUTS = " ".join("Q2_K*1" if conv else "Q3_K*1" for conv in CONVOLUTIONS)


@pytest.mark.parametrize(
    ("first", "mixture", "expected"),
    [
        (0, "Q2_K", {"in_proj": "Q2_K", "out_proj": OUTPUTS, "v_proj": "Q3_K"}),
        (0, "Q2_K_S", {"v_proj": "Q2_K", "w2": "Q4_K*2 Q2_K*14"}),
        (0, "Q3_K_M", {"in_proj": "Q3_K", "v_proj": "Q5_K*2 Q4_K*4", "w2": "Q5_K*1 Q4_K*15"}),
        (0, "Q4_K_S", {"in_proj": "Q4_K", "v_proj": "Q5_K*4 Q4_K*2", "w2": "Q5_K*2 Q4_K*14"}),
        (0, "Q4_K_M", {"in_proj": "Q4_K", "v_proj": "Q4_K*2 Q6_K*1 Q4_K*2 Q6_K*1", "w1": "Q4_K"}),
        (0, "IQ4_XS", {"v_proj": "IQ4_XS", "in_proj": "IQ4_XS"}),
        (2, "Q2_K", {"v_proj": "Q4_K", "w2": "Q3_K"}),
        (2, "IQ4_XS", {"v_proj": "Q5_K"}),
    ],
)
def test_convolutions_have_the_types_of_llama_cpps_own_file(
    first: int, mixture: str, expected: dict[str, str]
) -> None:
    """As in the table, with the blocks from ``first`` on; it decides whether queries share values."""
    order = [*CONVOLUTIONS[first:], *CONVOLUTIONS[:first]]
    config = Lfm2Config(
        vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=16, num_attention_heads=8,
        num_key_value_heads=2, layer_types=["conv" if conv else "full_attention" for conv in order],
        block_auto_adjust_ff_dim=False,
    )  # fmt: skip
    check_types(config, mixture, expected)


def check_types(config: PreTrainedConfig, mixture: str, expected: dict[str, str]) -> None:
    layouts = family_of(config).layouts(config)
    model = MixtureModel.of(layouts, architecture_of(config).name)
    found: dict[str, list[str]] = {}
    for block, layout in enumerate(layouts):
        for p in layout.projections:
            kind = mixture_type(mixture, matrix_of(layout, p), 256, model, block)
            found.setdefault(p.name, []).append(kind)
    for name, text in expected.items():
        assert found[name] == in_order(text, len(found[name]), mixture), name


@pytest.mark.parametrize(
    ("name", "columns", "expected"),
    [("Q3_K", 256, "Q3_K"), ("Q3_K", 576, "IQ4_NL"), ("Q5_K", 576, "Q5_1"), ("Q2_0", 576, "Q2_0")],
)
def test_a_type_that_is_no_mixture_is_that_of_every_matrix(name: str, columns: int, expected: str) -> None:
    model = MixtureModel(32, 4, large=False)
    assert {mixture_type(name, matrix, columns, model) for matrix in Matrix} == {expected}


@pytest.mark.parametrize(
    ("mixture", "of_attention", "of_down"),
    [
        ("Q3_K_M", ("Q3_K", "Q3_K", "Q3_K", "Q5_K"), "Q4_K"),
        ("Q2_K", ("Q2_K", "Q2_K", "Q2_K", "Q5_K"), "Q3_K"),
    ],
)
def test_of_latent_attention_the_output_alone_has_another_type(
    mixture: str, of_attention: tuple[str, ...], of_down: str
) -> None:
    """As llama.cpp's own file of a model with four blocks and 8 experts had them."""
    config = DeepseekV3Config(
        vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, q_lora_rank=256, kv_lora_rank=256, v_head_dim=64, n_routed_experts=8,
        moe_intermediate_size=256, first_k_dense_replace=1,
    )  # fmt: skip
    layouts = family_of(config).layouts(config)
    model = MixtureModel.of(layouts, architecture_of(config).name)
    types = {
        p.name: mixture_type(mixture, matrix_of(layouts[2], p), 256, model, 2) for p in layouts[2].projections
    }
    names = ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj")
    assert tuple(types[name] for name in names) == of_attention
    assert types["expert_3_down_proj"] == of_down
