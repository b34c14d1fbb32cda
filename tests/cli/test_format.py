"""quantization.format chooses block types of llama.cpp before the work, and refuses what doesn't go."""

import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, MixtralConfig, OPTConfig, PreTrainedConfig

from aespa_pl.commands.block_types import block_types, check_format, types_in_words, with_head
from aespa_pl.commands.job import checked
from aespa_pl.errors import UserError
from aespa_pl.models.llama_cpp_tokenizer import lacking_tokenizer
from aespa_pl.resolve import resolved
from aespa_pl.settings import BlockTuningSettings, QuantizationSettings, TuningSettings
from tests.jobs import embedded


def llama(hidden: int = 256, intermediate: int = 512) -> PreTrainedConfig:
    return LlamaConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, vocab_size=64,
    )  # fmt: skip


def test_a_mixture_gives_each_projection_its_type() -> None:
    settings = QuantizationSettings(format="Q3_K_M", types={"1.q_proj": "Q6_K"})
    types = block_types(settings, llama())
    assert types["0.q_proj"] == "Q3_K"
    assert types["1.q_proj"] == "Q6_K"
    assert types["0.v_proj"] == "Q5_K"
    assert types["0.o_proj"] == "Q4_K"
    filled = QuantizationSettings(format="Q3_K_M", types=types)
    assert filled.type_for(0, "v_proj") == "Q5_K"
    assert filled.bits_for(0, "v_proj") == 5
    assert "Q4_K for" in types_in_words(filled)


def test_a_pattern_names_many_projections_and_an_exact_key_counts_first() -> None:
    settings = QuantizationSettings(
        format="Q3_K", types={"0.q_proj": "Q4_K", "*.q_proj": "Q6_K", "v_proj": "Q5_K", "1": "Q8_0"}
    )
    types = block_types(settings, llama())
    assert types["0.q_proj"] == "Q4_K"
    assert types["0.v_proj"] == "Q5_K"
    assert types["0.k_proj"] == "Q3_K"
    assert types["1.q_proj"] == types["1.k_proj"] == "Q8_0"


def test_a_uniform_format_takes_types_of_embedding_and_head() -> None:
    settings = QuantizationSettings(types={"embedding": "Q6_K", "head": "Q8_0"})
    assert block_types(settings, llama()) == {"embedding": "Q6_K", "head": "Q8_0"}
    assert settings.type_for(0, "q_proj") is None


@pytest.mark.parametrize(("bits", "hidden", "kind"), [(8, 256, "Q8_0"), (4, 256, "Q4_K"), (4, 96, "Q4_1")])
def test_the_bits_of_the_head_are_a_block_type_that_fits(bits: int, hidden: int, kind: str) -> None:
    settings = QuantizationSettings(bits_of={"lm_head": bits, "v_proj": 4})
    found = with_head(settings, llama(hidden))
    assert (found.types, found.bits_of) == ({"head": kind}, {"v_proj": 4})


def test_bits_that_no_block_type_of_the_head_has_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"lm_head: 7, and no block type for rows of 256 .*: expected 2, 3, 4"
    ):
        with_head(QuantizationSettings(bits_of={"lm_head": 7}), llama())


def test_rows_that_are_no_whole_blocks_take_the_type_of_32() -> None:
    types = block_types(QuantizationSettings(format="Q3_K_S"), llama(192, 512))
    assert types["0.q_proj"] == "IQ4_NL"
    assert types["0.down_proj"] == "Q3_K"


@pytest.mark.parametrize(
    ("settings", "config", "message"),
    [
        (
            QuantizationSettings(format="Q4_0", types={"0.expert_3_up_proj": "Q8_0"}),
            MixtralConfig(
                hidden_size=64,
                intermediate_size=64,
                num_hidden_layers=1,
                num_attention_heads=4,
                num_key_value_heads=4,
                vocab_size=64,
                num_local_experts=4,
            ),
            r"0.expert_0_up_proj Q4_0 and 0.expert_3_up_proj Q8_0, but llama.cpp has up_proj of all experts",
        ),
        (QuantizationSettings(format="Q9"), llama(), "quantization.format is Q9: expected one of"),
        (QuantizationSettings(types={"0.q_proj": "Q4_K"}), llama(), "format is uniform"),
        (QuantizationSettings(format="Q4_K", types={"0.q_proj": "Q9"}), llama(), "0.q_proj: Q9"),
        (
            QuantizationSettings(format="Q4_K", types={"0.w": "Q4_K"}),
            llama(),
            r"0.w, which names nothing in this model: expected embedding, head or BLOCK.PROJECTION",
        ),
        (
            QuantizationSettings(types={"embedding": "Q6_K"}),
            llama(192, 512),
            r"embedding has rows of 192 .*set quantization.types '{embedding: Q8_0}'",
        ),
        (QuantizationSettings(format="Q4_K_M"), OPTConfig(), "set quantization.format uniform"),
        (QuantizationSettings(format="Q4_0"), llama(200, 512), "holds multiples of 32"),
        (
            QuantizationSettings(format="Q4_K", bits_of={"v_proj": 16}),
            llama(),
            r"bits_of has v_proj and quantization.format is Q4_K.* quantization.types, such as '{v_proj: Q8",
        ),
    ],
)
def test_what_does_not_go_is_refused(
    settings: QuantizationSettings, config: PreTrainedConfig, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        block_types(settings, config)


def test_a_tokenizer_that_llama_cpp_does_not_have_is_named_before_the_run(tmp_path: Path) -> None:
    assert lacking_tokenizer(tmp_path) is None  # it comes later
    Tokenizer(WordLevel({"a": 0}, "a")).save(str(tmp_path / "tokenizer.json"))
    assert re.search("only BPE is supported$", str(lacking_tokenizer(tmp_path)))


def test_bits_follow_the_format() -> None:
    settings = QuantizationSettings(format="Q3_K_M", bits=2, bits_of={"q_proj": 4})
    found = resolved(settings)
    assert (found.bits, found.bits_of) == (3, {})


def test_learning_rates_are_for_the_bits_of_most_matrices() -> None:
    """Rows of 192 weights are too short for Q2_K, so most matrices of this mixture have 4 bits."""
    given = (embedded("llama", QuantizationSettings(format=name)) for name in ("Q2_K", "Q4_0"))
    narrow, pure = (checked(s, torch.device("cpu"), llama(192, 512)).quantization for s in given)
    assert narrow.bits == 4
    assert narrow.tuning == pure.tuning


def test_methods_that_learn_something_else_refuse_a_format() -> None:
    check_format(QuantizationSettings(format="Q4_K"))
    blocks = BlockTuningSettings(parametrization="annealed")
    resolved(QuantizationSettings(format="Q4_K", tuning=TuningSettings(blocks)))
    with pytest.raises(UserError, match="straight-through or annealed"):
        resolved(QuantizationSettings(format="Q4_K", method="brecq"))
