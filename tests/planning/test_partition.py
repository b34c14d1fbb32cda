"""What does not fit into memory is worked on in parts, and comes out the same."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from aespa_pl.calibration.statistics import Hessian
from aespa_pl.errors import UserError
from aespa_pl.planning.partition import WHOLE, Divisible, HeadRange, Partition, learning_portions
from aespa_pl.run.checkpointing import JournaledCheckpointIO, StopAtIteration
from aespa_pl.run.folder import Training
from aespa_pl.run.interruption import Interruption, RunInterrupted
from aespa_pl.run.journal import Run
from aespa_pl.storage.batches import BatchesOnDisk, MatricesOnDisk
from tests.walks import Quantized, same_files, walk

DIVIDED = Partition(heads=1, weights=600)
"""One head at a time, and of the blocks of the examples two projections of the attention at most."""
EXPERTS_DIVIDED = Partition(heads=1, weights=4000, experts=3)
SHORT = {"rounding.iterations": 8}
CORRECTED = {**SHORT, "input_correction": 0.5, "polish.enabled": True}


def test_heads_and_experts_are_divided_evenly() -> None:
    none = range(0)
    assert Partition().passes(5, 0) == [(range(5), none)]
    assert Partition(heads=8).passes(5, 0) == [(range(5), none)]
    assert Partition(heads=2).passes(5, 0) == [
        (range(2), none), (range(2, 3), none), (range(3, 5), none)
    ]  # fmt: skip
    assert Partition(heads=1, experts=2).passes(1, 3) == [(range(1), range(2)), (none, range(2, 3))]
    assert Partition(heads=1, experts=4).passes(2, 4) == [(range(1), range(4)), (range(1, 2), none)]


@pytest.mark.parametrize("weights", [1, 40, 100, 130, 250, None])
@pytest.mark.parametrize("heads", [1, 3, None])
def test_every_head_is_learned_once(weights: int | None, heads: int | None) -> None:
    projections = [
        Divisible("q", 4, 80, on_disk=False),
        Divisible("v", 8, 80, on_disk=True),
        Divisible("o", 1, 120, on_disk=False),
    ]
    parts = learning_portions(projections, Partition(heads, weights))
    for p in projections:
        pieces = [piece for part in parts for piece in part if piece.name == p.name]
        found = [head for piece in pieces for head in range(piece.first, piece.end)]
        assert found == list(range(p.heads))
    for part in parts:
        each = {"q": 20, "v": 10, "o": 120}
        size = sum((piece.end - piece.first) * each[piece.name] for piece in part)
        one = len(part) == 1 and part[0].end - part[0].first == 1
        assert weights is None or size <= weights or one
        assert len({piece.name for piece in part}) == len(part)
        assert all(p.end - p.first <= (heads or 8) for p in part if p.name == "v")


def test_nothing_to_divide_is_one_portion_of_whole_projections() -> None:
    projections = [Divisible("q", 4, 80, on_disk=False), Divisible("o", 1, 120, on_disk=False)]
    assert learning_portions(projections, WHOLE) == [[HeadRange("q", 0, 4, 4), HeadRange("o", 0, 1, 1)]]
    assert learning_portions([], WHOLE) == []


def test_heads_on_disk_are_read_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A view of each head's diagonal would keep the matrices of all in memory."""
    kept: list[int] = []
    cat = torch.cat

    def seen(tensors: list[torch.Tensor]) -> torch.Tensor:
        kept.extend(tensor.untyped_storage().nbytes() for tensor in tensors)
        return cat(tensors)

    stored = MatricesOnDisk(BatchesOnDisk(tmp_path), torch.device("cpu")).append(torch.randn(5, 3, 3))
    monkeypatch.setattr(torch, "cat", seen)
    Hessian(stored)
    assert kept == [3 * 4] * 5


def test_heads_on_disk_read_like_a_tensor(tmp_path: Path) -> None:
    matrices = torch.randn(5, 3, 3)
    stored = MatricesOnDisk(BatchesOnDisk(tmp_path), torch.device("cpu"))
    stored.append(matrices[:2])
    stored.append(matrices[2:])
    assert list(tmp_path.iterdir()) == []  # a file without a name: nothing is left of it
    assert len(stored) == len(matrices)
    for heads in (slice(None), slice(1, 3), slice(4, 5)):
        assert torch.equal(stored[heads], matrices[heads])
    on_disk, in_memory = Hessian(stored), Hessian(matrices.clone())
    for share in (0.01, 0.1):  # the second damping replaces the first
        on_disk.damp(share)
        in_memory.damp(share)
        assert torch.equal(on_disk[1:4], in_memory[1:4])
        mean = matrices[2].diagonal().mean()
        expected = matrices[2] + share * mean * torch.eye(3)
        torch.testing.assert_close(on_disk[2:3][0], expected)
    assert torch.equal(stored[:], matrices)


def same_walks(divided: Quantized, whole: Quantized) -> None:
    same_files(divided, whole)
    for index in (0, 1):
        for projection, losses in whole.losses(index).items():
            # a rounding error decides whether a pass gained enough for another one, which then moves nothing
            found, expected = (
                {name: value for name, value in each.items() if name != "polish_passes"}
                for each in (divided.losses(index)[projection], losses)
            )
            assert found == pytest.approx(expected, rel=1e-5)
    assert not (divided.run.folder / "portions").exists()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    """What a walk finds that divides nothing."""
    return walk("llama-grouped", tmp_path_factory.mktemp("whole"), SHORT)


@dataclass(frozen=True)
class Divided:
    """Holds a walk in parts, and the names of what each part has learned."""

    found: Quantized
    learned: list[list[str]]


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Divided:
    learned: list[list[str]] = []

    class Note(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            learned.append([name for name, _ in pl_module.named_projections()])  # type: ignore[operator]

    found = walk(
        "llama-grouped",
        tmp_path_factory.mktemp("divided"),
        SHORT,
        options=lambda *_: {"callbacks": [Note()]},
        partition=DIVIDED,
    )
    return Divided(found, learned)


@pytest.mark.parametrize(
    ("name", "partition"),
    [*((name, DIVIDED) for name in ("opt", "llama-grouped", "bloom")), ("qwen2-moe", EXPERTS_DIVIDED)],
)
def test_parts_give_what_the_whole_gives_with_correction_and_polish(
    name: str, partition: Partition, tmp_path: Path
) -> None:
    whole = walk(name, tmp_path / "whole", CORRECTED)
    same_walks(walk(name, tmp_path / "divided", CORRECTED, partition=partition), whole)


def test_parts_give_what_the_whole_gives(whole: Quantized, divided: Divided) -> None:
    same_walks(divided.found, whole)


def test_values_are_learned_head_by_head(divided: Divided) -> None:
    learned = divided.learned
    names = [name for part in learned[: len(learned) // 2] for name in part]
    assert {"v_proj_heads_0_to_0", "v_proj_heads_1_to_1"} <= set(names)
    assert len(names) == len(set(names))
    assert not any({"v_proj_heads_0_to_0", "v_proj_heads_1_to_1"} <= set(part) for part in learned)


class StopIn(Callback):
    """Sends the signal in an iteration of one part of a block."""

    def __init__(self, interruption: Interruption, fits: list[int], part: int) -> None:
        self.interruption, self.fits, self.part = interruption, fits, part

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.fits.append(0)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if len(self.fits) == self.part and trainer.global_step == 5:
            self.interruption.received = 15


def stopping(fits: list[int], part: int) -> Callable[[Run, Training], dict[str, Any]]:
    def options(run: Run, training: Training) -> dict[str, Any]:
        interruption, folder = Interruption(), run.checkpoint_folder(training.block)
        return {
            "callbacks": [
                StopIn(interruption, fits, part), StopAtIteration(interruption, folder)
            ],
            "plugins": [JournaledCheckpointIO(run, training, folder)],
        }  # fmt: skip

    return options


@pytest.fixture(scope="module")
def third_part(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was stopped in the third part."""
    folder = tmp_path_factory.mktemp("stopped")
    run, fits = Run.create(folder / "runs", {}), list[int]()
    with pytest.raises(RunInterrupted):
        walk("llama-grouped", folder, SHORT, options=stopping(fits, 3), run=run, partition=DIVIDED)
    assert len(fits) == 3
    return run.folder


@pytest.fixture
def stopped(third_part: Path, tmp_path: Path) -> Run:
    """A copy of that run."""
    return Run.open(Path(shutil.copytree(third_part, tmp_path / "runs" / "version_0")))


def test_parts_that_are_done_are_not_learned_again(
    whole: Quantized, divided: Divided, stopped: Run, tmp_path: Path
) -> None:
    assert len(stopped.portions) == 2
    again: list[int] = []
    resumed = walk(
        "llama-grouped", tmp_path, SHORT, options=stopping(again, 99), run=stopped, partition=DIVIDED
    )
    assert len(again) == len(divided.learned) - 2
    same_files(resumed, whole)


@pytest.mark.parametrize("harm", ["damaged", "other parts"])
def test_part_that_is_of_no_use_is_learned_again(
    harm: str, whole: Quantized, stopped: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if harm == "damaged":
        stopped.portion_file(Training(0, "all", "block_000")).write_bytes(b"x")
    partition = DIVIDED if harm == "damaged" else Partition(heads=1, weights=2000)
    resumed = walk("llama-grouped", tmp_path, SHORT, run=stopped, partition=partition)
    assert ("is damaged or missing: it is learned again" in caplog.text) == (harm == "damaged")
    same_files(resumed, whole)


def test_full_disk_is_named_before_the_learning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("aespa_pl.storage.batches._bytes", full)
    with pytest.raises(UserError, match="No space left"):
        walk("llama-grouped", tmp_path, SHORT, partition=DIVIDED)
