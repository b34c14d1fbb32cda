"""A head that the configuration ties to the embedding may be in the file a second time."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from aespa_pl.models.pretrained import PretrainedFolder
from tests.models.examples import make_ids, make_model, save
from tests.models.test_pretrained import stream


@pytest.mark.parametrize("change", [0.0, 1.0])
def test_a_tied_head_that_the_file_has_as_well_is_the_embedding(change: float, tmp_path: Path) -> None:
    """Unless it is another: then transformers runs with it."""
    model, ids = make_model("opt", torch.float32), make_ids()
    save(model, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.decoder.embed_tokens.weight"] + change
    save_file(tensors, path, {"format": "pt"})
    pretrained = PretrainedFolder.open(tmp_path)
    assert ("lm_head.weight" in pretrained.stem_names()) is bool(change)
    # it is a matrix of its own then, which block types are chosen for
    assert ("head" in pretrained.embeddings()) is bool(change)
    assert pretrained.config.tie_word_embeddings is not bool(change)
    head, each = tensors["lm_head.weight"], 4
    everything = sum(value.numel() for value in tensors.values()) * each
    assert pretrained.bytes_beside(0) == everything - (0 if change else head.numel() * each)
    assert pretrained.bytes_beside(10, ["lm_head.weight"]) == everything - head.numel() * each - (
        10 * each if change else 10 * each + head.numel() * each
    )
    assert not pretrained.extra
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)(ids, use_cache=False).logits
    torch.testing.assert_close(stream(tmp_path, ids), expected.detach(), rtol=1e-5, atol=1e-5)
