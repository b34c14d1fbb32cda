"""Embedding and head in block types: the head is rounded for its inputs, an embedding row by row."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from aespa_pl.algorithm.grid_types import TYPES, TypedWeight
from aespa_pl.algorithm.refit import rounded_rows
from aespa_pl.errors import UserError
from aespa_pl.run.journal import Run
from tests.export.configurations import llama
from tests.models.examples import make_ids
from tests.walks import Quantized, shortened, walk

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TYPE = "Q3_K"


def quantized(
    folder: Path, method: str, *, tied: bool, correction: float = 0, run: Run | None = None
) -> Quantized:
    config = llama(hidden_size=256, intermediate_size=64, head_dim=16)
    config.tie_word_embeddings = tied
    torch.manual_seed(0)
    model: PreTrainedModel = shortened(AutoModelForCausalLM.from_config(config))
    types = {"embedding": TYPE} if tied else {"embedding": TYPE, "head": TYPE}
    changes: dict[str, Any] = {
        "method": method, "types": types, "polish.enabled": method != "rtn", "input_correction": correction,
    }  # fmt: skip
    model.requires_grad_(requires_grad=False)
    return walk("llama", folder, changes, model=model, ids=make_ids(24), run=run)


def stored(found: Quantized, name: str) -> Tensor:
    return TypedWeight.read(load_file(found.run.stem_file), name, TYPES[TYPE]).weight()


def inputs_of_the_head(found: Quantized) -> Tensor:
    """Return ``X [tokens, d]`` of the library's own model."""
    kept: list[Tensor] = []
    head = found.original.get_output_embeddings()
    head.register_forward_pre_hook(lambda _, x: kept.append(x[0].flatten(0, 1)))
    found.original(found.ids)
    return torch.cat(kept)


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_has_less_error_at_its_outputs_than_rounding_row_by_row(tied: bool, tmp_path: Path) -> None:
    found, name = quantized(tmp_path, "aespa-fast", tied=tied), EMBEDDING if tied else HEAD
    W, X = found.original.get_output_embeddings().weight, inputs_of_the_head(found)
    ours, rows = (
        float(((weight - W) @ X.T).square().sum())
        for weight in (stored(found, name), rounded_rows(W, TYPES[TYPE]).weight())
    )
    assert ours < (0.85 if tied else 0.75) * rows
    assert torch.equal(found.exported().get_output_embeddings().weight, stored(found, name))


def test_an_embedding_that_is_no_head_is_rounded_row_by_row(tmp_path: Path) -> None:
    found = quantized(tmp_path, "aespa-fast", tied=False)
    W = found.original.get_input_embeddings().weight
    assert torch.equal(stored(found, EMBEDDING), rounded_rows(W, TYPES[TYPE]).weight())


def test_an_embedding_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    config = llama(hidden_size=256, intermediate_size=64, head_dim=16)
    model: PreTrainedModel = shortened(AutoModelForCausalLM.from_config(config)).requires_grad_(
        requires_grad=False
    )
    model.get_input_embeddings().weight[3, 5] = torch.nan
    changes = {"method": "rtn", "types": {"embedding": TYPE}}
    with pytest.raises(UserError, match=rf"tensor {EMBEDDING} in .* has NaN or infinite values"):
        walk("llama", tmp_path, changes, model=model, ids=make_ids(4))


def test_a_method_that_compensates_nothing_rounds_the_head_row_by_row(tmp_path: Path) -> None:
    found = quantized(tmp_path, "rtn", tied=False)
    W = found.original.get_output_embeddings().weight
    assert torch.equal(stored(found, HEAD), rounded_rows(W, TYPES[TYPE]).weight())


def test_a_run_that_goes_on_sees_the_original_with_its_own_embedding(tmp_path: Path) -> None:
    """Block 0 has two streams already: that of the quantized embedding and the original's."""
    found = quantized(tmp_path, "aespa-fast", tied=True, correction=0.5)
    expected, journal = found.file(1), found.journal
    del journal["blocks"]["1"]
    journal["model"] = {}
    found.run.journal_file.write_text(json.dumps(journal))
    again = quantized(
        tmp_path / "again", "aespa-fast", tied=True, correction=0.5, run=Run.open(found.run.folder)
    )
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.file(1).items())


def test_a_run_that_goes_on_makes_a_damaged_file_of_the_embedding_again(tmp_path: Path) -> None:
    found = quantized(tmp_path, "rtn", tied=True)
    file, journal = found.run.stem_file, found.journal
    whole = file.read_bytes()
    del journal["blocks"]["1"]
    found.run.journal_file.write_text(json.dumps(journal | {"model": {}}))
    file.write_bytes(whole[:-100] + bytes(100))
    quantized(tmp_path, "rtn", tied=True, run=Run.open(found.run.folder))
    assert file.read_bytes() == whole
