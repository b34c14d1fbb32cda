"""Make tiny models with random weights, one of each kind that a family has to deal with."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from aespa_pl.models import family_of
from aespa_pl.models.observed import Attention
from tests.models.configurations import EXAMPLES
from tests.models.parts import LENGTH, VOCABULARY, WINDOW

__all__ = ["EXAMPLES", "LENGTH", "VOCABULARY", "WINDOW"]

every_example = pytest.mark.parametrize("name", EXAMPLES)
SINGLE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
"""The library's RMSNorm and its softmax are float32 in a float64 model: 6e-8 a rounding."""


def make_model(name: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """Return a model of which every weight, bias and norm is random."""
    return random_model(EXAMPLES[name](), dtype)


def random_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model of a configuration of which every weight, bias and norm is random."""
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    model.set_experts_implementation("eager")  # the others have no float64
    for parameter in model.parameters():
        parameter.requires_grad_(requires_grad=False)
        noise = torch.randn_like(parameter)
        parameter.copy_(noise * 0.3 if parameter.dim() > 1 else 1 + 0.4 * noise)
    for value in model.state_dict(keep_vars=True).values():
        if not isinstance(value, torch.nn.Parameter):  # corrections of routers
            value.copy_(0.3 * torch.randn(value.shape))
    return model


def make_ours(name: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """Return a random model whose experts have linear layers of their own."""
    model = make_model(name, dtype)
    family_of(model.config).unfuse(model)
    return model


def make_ids(segments: int = 2) -> Tensor:
    return torch.randint(3, VOCABULARY, (segments, LENGTH))


def observed(model: PreTrainedModel, ids: Tensor, index: int = 0) -> Attention:
    """Return what is seen of the attention of one block, which runs on the embeddings."""
    family = family_of(model.config)
    block = model.get_submodule(family.blocks_path)[index]
    seen: list[Attention] = []
    with family.observe_attention(model, block, seen.append):
        hidden, arguments = family.embed(model, ids)
        family.run_block(block, hidden, arguments)
    return seen[0]


def save(model: PreTrainedModel, folder: Path, max_shard_size: str = "5GB") -> Path:
    """Write a model with a tokenizer of one word a token."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    words = WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(folder)
    return folder
