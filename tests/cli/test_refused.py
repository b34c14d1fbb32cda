"""A damaged model and a full disk are refused before anything is computed."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.cli.commands import LAST, NO_TEXTS, CommandLine, Done, small


def damage_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def damage_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def damage_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def damage_family(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def put_nan(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 2] = math.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_config, r"no config\.json"),
        (damage_weights, r"model\.pretrained: .*safetensors"),
        (damage_tokenizer, r"tokenizer"),
        (damage_family, r"gpt2.*opt, bloom, llama"),
        (truncate, r"model\.safetensors"),
        (put_nan, r"layers\.1\.mlp\.down_proj\.weight .*NaN or infinite"),
    ],
)
def test_damaged_model_is_refused_before_calibration(
    aespa: CommandLine, model: Path, damage: Any, message: str
) -> None:
    shutil.copytree(model, "model")
    damage(Path("model"))
    status, out, err = aespa("fit", *small(Path("model")))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert re.search(message, err)


def test_full_disk_is_said_before_anything_is_computed(
    aespa: CommandLine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(".")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    status, out, err = aespa("fit", *small(model))
    assert (status, out) == (2, "")
    assert re.search(r"1\.0 KB free, but about [\d.]+ KB more are needed.* --output\.folder", err)


def test_refused_input_leaves_no_folder(
    aespa: CommandLine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(".")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert aespa("fit", *small(model), "--output.folder", "new/runs")[0] == 2
    assert not Path("new").exists()


def test_space_that_a_run_has_filled_itself_is_not_asked_for_again(
    aespa: CommandLine, model: Path, unmeasured: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*small(model), *NO_TEXTS]
    run = unmeasured.copied()
    (run / "metrics.json").unlink()
    # each file of the run is worth a MB to the second look: more than such a model needs
    (run / "ballast").write_bytes(bytes(2**20))
    usage = shutil.disk_usage(".")._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert aespa("fit", *arguments)[0] == 2
    assert aespa("fit", *arguments, *LAST)[0] == 0


def test_an_unknown_format_is_named_with_those_that_there_are(aespa: CommandLine, tmp_path: Path) -> None:
    status, _, err = aespa("export", tmp_path, "--format", "Q4_0x")
    expected = "aespa-pl: --format is Q4_0x: expected one of hf, compressed-tensors, awq, gptq, gguf\n"
    assert (status, err) == (2, expected)
