"""A run is checked before anything is made of it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aespa_pl.algorithm.quantizer import QuantizedWeight
from aespa_pl.errors import UserError
from aespa_pl.export.quantized import QuantizedModel
from tests.disks import flip
from tests.edited import edited
from tests.export.conftest import MakeRun
from tests.export.runs import CONFIGS, Known, dequantized, save_original


@pytest.mark.parametrize("name", ["llama", "opt", "bloom", "fused"])
def test_matrices_of_a_block_are_the_runs(name: str, known: MakeRun) -> None:
    run = known(name, 3, 32)
    model = QuantizedModel.open(run.folder)
    found: dict[str, Any] = {}
    for index in range(model.block_count):
        block = model.block(index)
        found |= {name: value for name, value in block.items() if not isinstance(value, Tensor)}
        for other in block.keys() - found.keys():
            assert torch.equal(block[other].float(), run.model.state_dict()[other].half().float())
    assert found.keys() == run.matrices.keys()
    for name, matrix in found.items():
        assert torch.equal(matrix.weight(), run.weight(name))


def test_dequantized_is_exact_for_every_integer_and_scale() -> None:
    q = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    zero = torch.arange(256, dtype=torch.uint8)[:, None]
    scale = torch.randint(1, 2**15 - 2**10, (256, 1)).short().view(torch.float16)
    matrix = QuantizedWeight(q, scale, zero, 8)
    assert torch.equal(matrix.weight(), dequantized(q, scale, zero))


def test_unfinished_run_is_refused(fresh: Known) -> None:
    with edited(fresh.folder / "journal.json") as journal:
        journal["model"] = {}
    folder = fresh.folder.rename(fresh.folder.parent / "a version")
    with pytest.raises(
        UserError, match=r"is not finished: continue it with aespa-pl fit --ckpt_path '.*a version'"
    ):
        QuantizedModel.open(folder)


@pytest.mark.parametrize(
    "file",
    [
        "blocks/block_001.safetensors",
        "model/model-00003-of-00003.safetensors",
        "model/model-00001-of-00003.safetensors",
    ],
)
def test_damaged_file_is_refused_by_name(file: str, fresh: Known) -> None:
    flip(fresh.folder / file)
    with pytest.raises(
        UserError, match=rf"missing or changed: {file}.*: mend it with aespa-pl fit --ckpt_path"
    ):
        QuantizedModel.open(fresh.folder)


def test_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not the folder of a run"):
        QuantizedModel.open(tmp_path)


@pytest.mark.parametrize("content", ["", "model: {}", "- 1", "a: b: c"])
def test_damaged_configuration_is_refused(content: str, fresh: Known) -> None:
    (fresh.folder / "config.yaml").write_text(content)
    with pytest.raises(UserError, match=r"config.yaml cannot be read \([^\n]*\): restore it, or copy the"):
        QuantizedModel.open(fresh.folder)


def test_another_original_is_refused(fresh: Known, tmp_path: Path) -> None:
    other = save_original(CONFIGS["llama-untied"](), tmp_path / "other")
    with pytest.raises(UserError, match=r"was made from another model than .*other"):
        QuantizedModel.open(fresh.folder, str(other))


def test_original_that_was_moved_can_be_given(fresh: Known, tmp_path: Path) -> None:
    shutil.move(fresh.original, tmp_path / "moved")
    for given in (None, "nowhere"):
        with pytest.raises(UserError, match=r"^--original: .*there is no folder .*: give "):
            QuantizedModel.open(fresh.folder, given)
    model = QuantizedModel.open(fresh.folder, str(tmp_path / "moved"))
    assert model.original == tmp_path / "moved"


def test_grid_is_what_the_configuration_says(fresh: Known) -> None:
    model = QuantizedModel.open(fresh.folder)
    assert (model.bits, model.quantization.group_size, model.quantization.symmetric) == (4, 32, False)
    assert model.granularity == "4 bits, groups of 32, asymmetric"
    with edited(fresh.folder / "config.yaml") as settings:
        settings["quantization"] |= {"group_size": None, "symmetric": True}
    assert QuantizedModel.open(fresh.folder).granularity == "4 bits, per channel, symmetric"
