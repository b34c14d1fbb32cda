"""Hidden states on disk read like those in memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aespa_pl.errors import UserError
from aespa_pl.storage.batches import BatchesOnDisk, NamedMatrices


def batches(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(size, 5, 4).to(dtype) for size in (2, 2, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_batches_come_back_as_they_were_written(dtype: torch.dtype, tmp_path: Path) -> None:
    expected = batches(dtype)
    stored = BatchesOnDisk(tmp_path, expected)
    assert len(stored) == 3
    for i in (2, 0, 1, 0):
        assert torch.equal(stored[i], expected[i])
    with pytest.raises(IndexError):
        stored[3]


def test_a_batch_is_replaced_and_the_others_stay(tmp_path: Path) -> None:
    expected = batches()
    stored = BatchesOnDisk(tmp_path, expected)
    for i in (1, 2):
        expected[i] = torch.randn_like(expected[i])
        stored[i] = expected[i].mT.contiguous().mT  # in another order in memory
    assert all(torch.equal(stored[i], expected[i]) for i in range(3))


def test_a_batch_may_become_smaller(tmp_path: Path) -> None:
    expected = batches()
    stored = BatchesOnDisk(tmp_path, expected)
    for i in (0, 1):
        stored[i] = expected[i] = expected[i][..., :3]
    assert all(torch.equal(stored[i], expected[i]) for i in range(3))
    assert torch.equal(stored.item(1, 1), expected[1][1])


def test_what_was_read_is_the_callers(tmp_path: Path) -> None:
    expected = batches()
    stored = BatchesOnDisk(tmp_path, expected)
    stored[0].zero_()
    assert torch.equal(stored[0], expected[0])


def test_the_file_has_no_name(tmp_path: Path) -> None:
    stored = BatchesOnDisk(tmp_path / "new", batches())
    assert list((tmp_path / "new").iterdir()) == []
    assert len(stored[0]) == 2


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match="file/hidden"):
        BatchesOnDisk(tmp_path / "file" / "hidden", batches())


def test_names_of_matrices_are_known_without_reading_one() -> None:
    class Unreadable(list[Tensor]):
        def __getitem__(self, _: Any) -> Any:
            raise AssertionError("read")

    matrices = NamedMatrices({"here": Unreadable()})
    assert "here" in matrices
    assert "elsewhere" not in matrices
