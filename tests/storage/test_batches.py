"""Hidden states on disk read like those in memory; batches move while an accelerator works on others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aespa_pl.errors import UserError
from aespa_pl.storage.batches import Batches, BatchesOnDisk, in_turn, sending_back
from tests.device.simulated import simulated
from tests.device.tally import counting


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


def make(where: str, batches: list[Tensor], folder: Path, device: torch.device) -> Batches:
    if where == "disk":
        return BatchesOnDisk(folder, batches)
    if where == "device":
        return [batch.to(device) for batch in batches]
    return [batch.pin_memory() if where == "pinned" else batch for batch in batches]


@pytest.mark.parametrize("where", ["memory", "pinned", "disk", "device"])
def test_batches_are_replaced_by_results_without_a_wait(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [torch.randn(2, 3, 4), torch.randn(2, 3, 4), torch.randn(1, 3, 4)]
    with simulated(monkeypatch) as device:
        batches = make(where, list(given), tmp_path, device)
        with counting() as found:
            for _ in range(2):
                with sending_back(batches, device) as replace:
                    for i, batch in enumerate(in_turn(batches, device)):
                        assert batch.device == device
                        replace(i, 2 * batch)
        assert not found.waits
        assert found.kernels == {"mul": 6}
        result = [batches[i].cpu() for i in range(3)]
    assert all(torch.equal(a, 4 * b) for a, b in zip(result, given, strict=True))


def test_results_come_back_while_the_device_works_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [torch.full((1, 2), float(i)) for i in range(4)]
    with simulated(monkeypatch) as device:
        batches = list(given)
        with sending_back(batches, device) as replace:
            for i, batch in enumerate(in_turn(batches, device)):
                replace(i, batch + 10)
                done = [j for j in range(4) if float(batches[j][0, 0]) >= 10]
                assert done == list(range(i))  # all but the one under way
        assert [float(batch[0, 0]) for batch in batches] == [10, 11, 12, 13]


def test_on_a_cpu_nothing_is_copied() -> None:
    given, cpu = [torch.ones(1, 2), torch.zeros(1, 2)], torch.device("cpu")
    batches: Batches = list(given)
    assert all(a is b for a, b in zip(in_turn(batches, cpu), given, strict=True))
    result = torch.ones(1, 2)
    with sending_back(batches, cpu) as replace:
        replace(1, result)
        assert batches[1] is result


def test_a_batch_is_not_read_before_its_turn_on_a_cpu() -> None:
    """Where hidden states are on disk, one batch of a stream is in memory."""
    asked: list[int] = []

    class Watched(list[Tensor]):
        def __getitem__(self, index: Any) -> Any:
            asked.append(index)
            return super().__getitem__(index)

    turns = in_turn(Watched([torch.zeros(1)] * 3), torch.device("cpu"))
    for i in range(3):
        next(turns)
        assert asked == list(range(i + 1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU (its streams) and --gpu")
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_gpu_gets_each_batch_before_those_before_are_replaced(where: str, tmp_path: Path) -> None:
    """Each copy has work behind it that takes longer than the copy, so that one too early would show."""
    device = torch.device("cuda")
    kept = [torch.randn(2, 512, 64) for _ in range(5)]
    batches = make(where, [value.clone() for value in kept], tmp_path, device)
    sums = []
    for i, batch in enumerate(in_turn(batches, device)):
        work = torch.randn(1024, 1024, device=device)
        for _ in range(20):
            work = torch.tanh(work @ work)
        sums.append(batch + 0 * work[0, 0])  # not read before the work is done
        batches[i] = torch.full_like(kept[i], torch.nan)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(sums, kept, strict=True))
