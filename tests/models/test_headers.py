"""Each thing that can be wrong with a folder is found before any work, and named."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aespa_pl.errors import UserError
from aespa_pl.models import headers
from aespa_pl.models.headers import read_config
from aespa_pl.models.pretrained import PretrainedFolder
from tests.models.examples import make_model, save

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good model in one file."""
    return save(make_model("opt", torch.float32), tmp_path)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A good model in several files."""
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
        PretrainedFolder.open(folder)


def test_of_two_savings_the_whole_file_counts_as_in_transformers(folder: Path, tmp_path: Path) -> None:
    other = save(make_model("opt", torch.float32), tmp_path / "other", "8KB")
    for path in other.glob("model*"):
        shutil.copy(path, folder)
    assert headers.shards(folder) == [folder / "model.safetensors"]


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    refused(folder, f"no config.json in {folder}: give the folder of a Hugging Face model")


def test_damaged_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    refused(folder, r"config.json cannot be read \(.*\): copy it from the model's origin")


def test_config_that_the_library_refuses(folder: Path) -> None:
    change_config(folder, hidden_size="many")
    refused(folder, r"config.json cannot be read \(.*hidden_size")


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("opt", {"hidden_size": 25}, "can't run the model .*divisible"),
        ("opt", {"num_attention_heads": 0}, "num_attention_heads in config.json is 0: expected 1"),
        ("opt", {"num_attention_heads": -4}, "num_attention_heads in config.json is -4"),
        ("opt", {"num_hidden_layers": 0}, "num_hidden_layers in config.json is 0"),
        ("opt", {"num_hidden_layers": "3"}, "config.json cannot be read .*num_hidden_layers"),
        ("opt", {"vocab_size": -3}, "vocab_size in config.json is -3"),
        ("opt", {"vocab_size": 10**18}, "can't run the model"),
        ("opt", {"ffn_dim": 0}, "can't run the model .*fc1 is 0 x 24"),
        ("opt", {"max_position_embeddings": 0}, "can't run the model .*max_position_embeddings"),
        ("opt", {"activation_function": "nope"}, "can't run the model .*'nope'"),
        ("opt", {"pad_token_id": 9999}, "can't run the model .*Padding_idx"),
        ("bloom", {"n_head": 5}, "can't run the model .*divisible"),
        ("bloom", {"n_layer": 0}, "num_hidden_layers in config.json is 0"),
        ("llama", {"num_key_value_heads": 3}, "4 query heads can't share 3 key/value heads"),
        ("llama", {"num_key_value_heads": 0}, "can't run the model"),
        ("llama", {"head_dim": 7}, "config.json cannot be read .*even rotary dimension"),
        ("llama", {"hidden_act": "nope"}, "can't run the model .*'nope'"),
        ("llama", {"rope_parameters": {"rope_type": "nope"}}, "can't run the model .*'nope'"),
        ("llama", {"rope_parameters": [1]}, "config.json cannot be read"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "can't run the model .*sliding_window"),
        ("qwen3", {"layer_types": ["full_attention"]}, "config.json cannot be read"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of transformers, about what it is going to fail on
def test_config_whose_model_can_not_be_made_or_run(
    name: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder = save(make_model(name, torch.float32), tmp_path)
    change_config(folder, **changes)
    with pytest.raises(UserError, match=f"model.pretrained: .*{reason}"):
        read_config(folder)  # as plan does
    refused(folder, reason)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
def test_every_kind_of_rope_that_the_library_knows_is_let_through(kind: str, tmp_path: Path) -> None:
    folder = save(make_model("llama", torch.float32), tmp_path)
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    change_config(folder, rope_parameters=rope)
    assert read_config(folder).rope_parameters["rope_type"] == kind


@pytest.mark.parametrize("nested", ["[" * 200_000, '{"a":' * 200_000])
def test_config_nested_without_end(folder: Path, nested: str) -> None:
    (folder / "config.json").write_text(nested)
    refused(folder, r"config.json cannot be read \(maximum recursion")


@pytest.mark.parametrize("model_type", ["gpt2", "of-the-future", None])
def test_unknown_model_type(folder: Path, model_type: str | None) -> None:
    change_config(folder, model_type=model_type)
    what = (
        "config.json has no model_type" if model_type is None else f"model_type {model_type!r} in .* is not"
    )
    refused(folder, f"{what}.*: expected one of .* qwen3")


def test_quantized_checkpoint(folder: Path) -> None:
    change_config(folder, quantization_config={"quant_method": "awq"})
    refused(folder, r"^model\.pretrained: already quantized \(awq")


def test_sentencepiece_is_named_where_it_is_needed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    monkeypatch.setattr(headers, "find_spec", lambda _: None)
    refused(folder, "a tokenizer.model alone, which needs the package sentencepiece: pip install")
    (folder / "vocab.json").touch()
    PretrainedFolder.open(folder)
    (folder / "vocab.json").unlink()
    monkeypatch.setattr(headers, "find_spec", lambda name: name)
    PretrainedFolder.open(folder)


@pytest.mark.filterwarnings("default")
def test_no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    refused(folder, f"no tokenizer in {folder}: expected one of tokenizer.json")
    (folder / "hy.tiktoken").touch()
    refused(folder, "hy.tiktoken is read by code of the model alone: take a copy of it with tokenizer.json")


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refused(folder, f"model.safetensors missing in {folder}")


def test_missing_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    refused(sharded, f"{shard.name} missing in {sharded}")


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "{}",
        "[]",
        "[" * 200_000,
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": 3, "b": "model.safetensors"}}',
        '{"weight_map": {"a": null}}',
        '{"weight_map": {"a": ["model.safetensors"]}}',
        '{"weight_map": {"a": ""}}',
        '{"weight_map": {"a": "../model.safetensors"}}',
    ],
)
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
    is_pointer = shard.read_bytes().startswith(b"version")
    advice = "git lfs pull" if is_pointer else "copy it again"
    refused(sharded, f"{shard} is truncated or damaged .*: .*{advice}")


def test_file_that_can_not_be_read_is_not_called_damaged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system refuses even root, as with a disk that fails."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(headers, "safe_open", fail)
    refused(folder, r"model.safetensors cannot be read \(Input/output error\): correct its perm")


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


def test_fewer_experts_than_config_json_asks_for(tmp_path: Path) -> None:
    folder = save(make_model("gpt-oss", torch.float32), tmp_path)
    change_config(folder, num_local_experts=16)
    refused(folder, r"experts\.\w+ in .* does not hold the experts that config.json beside it asks for")
