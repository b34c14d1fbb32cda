"""Each thing that can be wrong with a folder is found before any work, and named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aespa_pl.errors import UserError
from aespa_pl.models.pretrained import Checkpoint
from tests.models.examples import make_model, save

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good checkpoint of one file."""
    return save(make_model("opt", torch.float32), tmp_path)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A good checkpoint of several files."""
    return save(make_model("opt", torch.float32), tmp_path, "8KB")


def change_config(folder: Path, **options: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **options}))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def refused(folder: Path, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Checkpoint.open(folder)


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    refused(folder, f"no config.json in {folder}: give the folder of a Hugging Face checkpoint")


def test_damaged_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    refused(folder, r"config.json cannot be read \(.*\): copy it from the model's origin")


def test_config_that_the_library_refuses(folder: Path) -> None:
    change_config(folder, hidden_size="many")
    refused(folder, r"config.json cannot be read \(.*hidden_size")


@pytest.mark.parametrize("model_type", ["gpt2", "of-the-future", None])
def test_unknown_model_type(folder: Path, model_type: str | None) -> None:
    change_config(folder, model_type=model_type)
    refused(folder, f"model_type {model_type!r} in config.json is not supported: .* qwen3")


def test_quantized_checkpoint(folder: Path) -> None:
    change_config(folder, quantization_config={"quant_method": "awq"})
    refused(folder, r"already quantized \(awq")


@pytest.mark.filterwarnings("default")
def test_no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    refused(folder, f"no tokenizer in {folder}: expected one of tokenizer.json")


def test_pickles_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, "has weights in pickles .* load the model with transformers, save it with")


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refused(folder, f"model.safetensors missing in {folder}")


def test_missing_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    refused(sharded, f"{shard.name} missing in {sharded}")


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"weight_map": []}'])
def test_damaged_index(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_text(content)
    refused(sharded, f"{INDEX} is damaged")


@pytest.mark.parametrize(
    "content",
    [
        lambda whole: whole[:-8],
        lambda whole: whole + b"12345678",
        lambda whole: whole[:20],
        lambda _: b"",
        lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
    ],
    ids=["short", "long", "header", "empty", "git-lfs"],
)
def test_truncated_shard(sharded: Path, content: Callable[[bytes], bytes]) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[-1]
    shard.write_bytes(content(shard.read_bytes()))
    refused(sharded, f"{shard} is truncated or damaged .*git lfs pull")


def test_missing_tensor(folder: Path) -> None:
    name = "model.decoder.layers.2.fc2.bias"
    change_tensors(folder, lambda tensors: tensors.pop(name))
    refused(folder, f"tensor {name} is missing in {folder}")


def test_missing_head_of_a_model_that_is_not_tied(folder: Path) -> None:
    change_config(folder, tie_word_embeddings=False)
    refused(folder, "tensor lm_head.weight is missing")


def test_tensor_of_another_shape(folder: Path) -> None:
    change_config(folder, ffn_dim=28)
    refused(
        folder,
        r"tensor model.decoder.layers.0.fc1.weight in .*model.safetensors is \[20, 24\], but "
        r"config.json beside it asks for \[28, 24\]",
    )


def test_tensor_of_integers(folder: Path) -> None:
    name = "model.decoder.layers.0.fc1.weight"
    change_tensors(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    refused(folder, f"tensor {name} in .* is stored as I8: expected F64, F32, F16, BF16")


def test_good_folders_are_opened(folder: Path) -> None:
    assert len({stored.file for stored in Checkpoint.open(folder).tensors.values()}) == 1
