"""Folders that hold packed weights are told from others."""

import json
from pathlib import Path
from typing import Any

import pytest

from aespa_pl.commands.evaluate import quantized_folder
from aespa_pl.errors import UserError
from aespa_pl.settings import ModelSettings


def test_packed_weights_are_told_from_others(tmp_path: Path) -> None:
    model = ModelSettings(pretrained=str(tmp_path))
    assert quantized_folder(model) is None
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert quantized_folder(model) is None
    packed = {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}
    (tmp_path / "config.json").write_text(json.dumps(packed))
    assert quantized_folder(model) == tmp_path


@pytest.mark.parametrize(
    "config", [["gptq"], "gptq", {}, 4, {"quant_method": "nosuch"}, {"quant_method": ["gptq"]}]
)
def test_an_unknown_packing_is_not_measured_as_if_there_were_none(tmp_path: Path, config: Any) -> None:
    content = {"model_type": "llama", "quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="has no quant_method that transformers knows"):
        quantized_folder(ModelSettings(pretrained=str(tmp_path)))


def test_gguf_is_refused_with_what_can_be_tested(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"for llama\.cpp.*or its export as compressed-tensors"):
        quantized_folder(ModelSettings(pretrained=str(tmp_path)))
