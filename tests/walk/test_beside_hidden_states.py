"""Gemma 4 E2B and E4B: borrowed keys and values, and embeddings of blocks, travel with the hidden states."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from aespa_pl.models import family_of
from aespa_pl.models.observed import Attention
from aespa_pl.walk.block_tuner import feed_forward_start
from tests.models.examples import make_ids, make_model
from tests.walks import walk

NAME = "gemma4-small"


def states(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = model(ids, use_cache=False, output_hidden_states=True).hidden_states
    return found


def test_a_block_that_borrows_sees_the_keys_of_the_last_of_its_kind() -> None:
    model, ids = make_model(NAME, torch.float32), make_ids()
    family, seen = family_of(model.config), list[Attention]()
    stream, _ = family.embed(model, ids)
    widths = [stream.shape[-1]]
    for index, block in enumerate(model.model.layers):
        layout = family.layout(model.config, index)
        assert layout.borrows_keys == (index == 2)
        assert layout.attended_group is not None and layout.attended_group.name == "attention_output"  # noqa: PT018
        with family.observe_attention(model, block, seen.append):
            stream = family.run_block(block, stream, family.arguments(model, stream))
        widths.append(stream.shape[-1])
    assert torch.equal(seen[2].key, seen[1].key)  # both have full attention, the first a window
    assert not torch.equal(seen[2].query, seen[1].query)
    assert seen[2].query_inverse_square is not None
    assert seen[2].key_inverse_square is None
    inputs = model.config.hidden_size_per_layer_input
    assert [before - after for before, after in pairwise(widths)] == [inputs] * 3


def test_the_error_of_an_output_is_that_of_the_hidden_states_alone(tmp_path: Path) -> None:
    found = walk(NAME, tmp_path, {"method": "aespa-fast", "bits": 3, "input_correction": 0.5})
    before, after = (states(model, found.ids)[1] for model in (found.original, found.exported()))
    expected = float((after - before).square().sum() / before.square().sum())
    assert found.journal["blocks"]["0"]["output_error"]["rounded"] == pytest.approx(expected, rel=1e-3)


def test_training_makes_the_error_smaller(tmp_path: Path) -> None:
    changes = {
        "method": "aespa-tuned", "bits": 2, "tuning.blocks.epochs": 12, "tuning.model.epochs": 1,
    }  # fmt: skip
    found = walk(NAME, tmp_path, changes)
    tuning = found.journal["blocks"]["0"]["tuning"]
    assert tuning["error"] < tuning["start_error"]
    assert feed_forward_start(found.layout.groups) == "pre_feedforward_layernorm"
