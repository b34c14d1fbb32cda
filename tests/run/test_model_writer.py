"""The library loads what is written, and nothing that is written in part."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoTokenizer

from aespa_pl.models import family_of
from aespa_pl.models.pretrained import PretrainedFolder
from aespa_pl.run.model_writer import ModelWriter
from tests.disks import full, refused
from tests.export.folders import load
from tests.models.examples import every_example, make_ids, make_model, save


def export(source: Path, folder: Path, change: Callable[[Tensor], Tensor] = lambda t: t) -> PretrainedFolder:
    """Write the model of a folder anew, block by block."""
    pretrained = PretrainedFolder.open(source)
    family = family_of(pretrained.config)
    count = int(pretrained.config.num_hidden_layers)
    writer = ModelWriter(folder, count)
    writer.write_stem({name: pretrained.tensor(name) for name in pretrained.stem_names()})
    for index in range(count):
        names = pretrained.block_names(index)
        writer.write_block(index, family.as_stored({n: change(pretrained.tensor(n)) for n in names}))
        assert writer.block_file(index).is_file()
    assert not (folder / "model.safetensors.index.json").exists()  # not yet a model
    writer.finish(source, {})
    return pretrained


@every_example
def test_library_loads_what_was_written(name: str, tmp_path: Path) -> None:
    model, ids = make_model(name, torch.float32), make_ids()
    export(save(model, tmp_path / "source"), tmp_path / "export")
    loaded = load(tmp_path / "export")
    loaded.set_experts_implementation("eager")  # as the examples have it
    assert type(loaded) is type(model)
    state = model.state_dict()
    for key, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, state.pop(key))
    assert not state
    assert loaded.config.to_diff_dict().keys() == model.config.to_diff_dict().keys()
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits
        # linear attention has sums whose order depends on where in memory its tensors lie
        torch.testing.assert_close(loaded(ids, use_cache=False).logits, expected, rtol=1e-5, atol=1e-5)
    # and so do we: a block a file, and one for the rest
    again = PretrainedFolder.open(tmp_path / "export")
    assert {stored.file.name for stored in again.tensors.values()} == {
        f"model-{i:05}-of-00004.safetensors" for i in range(1, 5)
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_changed_weights_are_the_ones_loaded_in_their_own_type(dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_model("llama", dtype)
    export(save(model, tmp_path / "source"), tmp_path / "export", torch.neg)
    loaded = load(tmp_path / "export")
    assert loaded.dtype == dtype
    for key, tensor in loaded.state_dict().items():
        expected = model.state_dict()[key]
        assert torch.equal(tensor, -expected if ".layers." in key else expected)


def test_block_file_holds_its_block_only(tmp_path: Path) -> None:
    pretrained = export(save(make_model("opt"), tmp_path / "source"), tmp_path / "export")
    writer = ModelWriter(tmp_path / "export", 3)
    for index in range(3):
        with safe_open(writer.block_file(index), framework="pt") as file:
            assert set(file.keys()) == set(pretrained.block_names(index))
            assert file.metadata() == {"format": "pt"}


def test_tokenizer_and_generation_settings_are_taken_along(tmp_path: Path) -> None:
    source = save(make_model("opt", torch.float32), tmp_path / "source")
    (source / "generation_config.json").write_text('{"max_new_tokens": 17}')
    export(source, tmp_path / "export")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert tokenizer(["w3", "w17"])["input_ids"] == [[3], [17]]
    assert load(tmp_path / "export").generation_config.max_new_tokens == 17


def test_origin_without_generation_settings_is_no_error(tmp_path: Path) -> None:
    source = save(make_model("opt", torch.float32), tmp_path / "source")
    (source / "generation_config.json").unlink()
    export(source, tmp_path / "export")
    assert not (tmp_path / "export" / "generation_config.json").exists()
    load(tmp_path / "export")


def test_disk_that_fills_at_the_end_leaves_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save(make_model("opt", torch.float32), tmp_path / "source")
    monkeypatch.setattr(Path, "write_bytes", full)
    with refused(tmp_path / "export"):
        export(source, tmp_path / "export")
    assert not (tmp_path / "export" / "model.safetensors.index.json").exists()


def test_files_beside_the_weights_are_the_originals_byte_for_byte(tmp_path: Path) -> None:
    source = save(make_model("llama", torch.float32), tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    rope = config.pop("rope_parameters")  # transformers 5 writes this, engines on 4 want that:
    config |= {"rope_theta": rope["rope_theta"], "torch_dtype": "float32"}
    written = {
        "config.json": json.dumps(config).encode(),
        "tokenizer.model": b"\x00\x01",
        "merges.txt": b"#version: 0.2\r\n",
        "vocab.json": b"{}",
        "special_tokens_map.json": b'{ "bos_token":"<s>"}',
        "chat_template.jinja": b"{{ messages }}",
        "additional_chat_templates/tools.jinja": b"{{ tools }}",
        "LICENSE": b"do as you like",
    }
    for name, content in written.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(content)
    (source / "train.py").write_text("not the model's")
    export(source, tmp_path / "export")
    for name, content in written.items():
        assert (tmp_path / "export" / name).read_bytes() == content
    assert not (tmp_path / "export" / "train.py").exists()
    assert load(tmp_path / "export").config.rope_parameters == rope
