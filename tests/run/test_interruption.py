"""A signal stops at once, or while a block is rounded after the iteration, with a checkpoint."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from aespa_pl.run.checkpointing import JournaledCheckpointIO, PeriodicCheckpoint, StopAtIteration
from aespa_pl.run.interruption import SIGNALS, Interruption, RunInterrupted
from aespa_pl.run.journal import Run
from aespa_pl.settings import OutputSettings
from tests.walks import BASE, Quantized, walk

LAST = BASE.rounding.iterations
both = pytest.mark.parametrize("number", SIGNALS)


def send(number: int) -> None:
    os.kill(os.getpid(), number)  # Python runs the handler before the next line


@both
def test_signal_stops_at_once(number: signal.Signals) -> None:
    interruption = Interruption()
    with pytest.raises(RunInterrupted, match=f"^{number.name}$") as caught, interruption.watching():
        send(number)
    assert caught.value.number == number
    assert not isinstance(caught.value, Exception)  # nothing that handles errors handles it


@both
def test_deferred_signal_waits_for_check(number: signal.Signals) -> None:
    interruption = Interruption()
    with interruption.watching():
        interruption.defer(active=True)
        interruption.check()
        send(number)
        with pytest.raises(RunInterrupted):
            interruption.check()


@both
def test_second_signal_does_not_wait(number: signal.Signals) -> None:
    interruption = Interruption()
    with interruption.watching():
        interruption.defer(active=True)
        send(signal.SIGTERM)
        with pytest.raises(RunInterrupted):
            send(number)


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    interruption = Interruption()
    with interruption.watching():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before
    interruption.defer(active=True)  # takes no signals any more
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_other_threads_leave_signals_alone() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    inside: list[Any] = []

    def work() -> None:
        interruption = Interruption()
        with interruption.watching():
            interruption.defer(active=True)
            inside.extend(signal.getsignal(number) for number in SIGNALS)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert inside == before


EVERY_FIVE = OutputSettings(checkpoint_iterations=5, checkpoint_seconds=None)


@pytest.fixture
def single_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each Lightning step one iteration."""
    monkeypatch.setattr("aespa_pl.rounding.module.STEP_SECONDS", 0.0)


class SignalAt(Callback):
    """Sends a signal in a hook of the block ``index`` at ``step``."""

    def __init__(self, number: int, step: int, hook: str, index: int = 1) -> None:
        self.number = number
        self.step = step
        self.index = index
        self.trainings = 0
        setattr(self, hook, self._send)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.trainings += 1

    def _send(self, trainer: Trainer, *_: object) -> None:
        if self.trainings == self.index + 1 and trainer.global_step == self.step:
            send(self.number)


def options(
    interruption: Interruption,
    before: list[Callback],
    after: list[Callback],
    output: OutputSettings = EVERY_FIVE,
) -> Callable[[Run, int], dict[str, Any]]:
    """Return what the command line adds to each block's Trainer, and callbacks around it."""

    def make(run: Run, index: int) -> dict[str, Any]:
        folder = run.checkpoint_folder(index)
        stop = StopAtIteration(interruption, folder)
        callbacks = [*before, stop, *after, PeriodicCheckpoint(output, folder)]
        plugins = [JournaledCheckpointIO(run, index)]
        return {"callbacks": callbacks, "plugins": plugins}

    return make


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    return walk("opt", tmp_path_factory.mktemp("whole"))


@pytest.mark.filterwarnings("ignore:.*exists and is not empty.*")  # as on the command line
@pytest.mark.parametrize(
    ("hook", "step", "saved"),
    [
        ("on_train_batch_start", 0, 1),
        ("on_train_batch_start", 7, 8),
        ("on_train_batch_start", LAST - 1, LAST),
        ("on_train_batch_end", 7, 8),  # after our callback: seen in the next iteration
        ("on_train_batch_end", LAST, LAST),  # there is no next one
        ("on_train_epoch_end", LAST, LAST),
    ],
)
@pytest.mark.usefixtures("single_iterations")
@both
def test_signal_in_an_iteration_saves_and_goes_on_to_the_same_tensors(
    number: signal.Signals, hook: str, step: int, saved: int, whole: Quantized, tmp_path: Path
) -> None:
    interruption = Interruption()
    sender = SignalAt(number, step, hook)
    with pytest.raises(RunInterrupted, match=number.name), interruption.watching():
        walk("opt", tmp_path, options=options(interruption, [], [sender]))
    run = Run.open(tmp_path / "runs" / "version_0")
    assert list(run.blocks) == [0]
    assert run.checkpoint is not None
    run.pieces = run.checkpoint["pieces"]
    assert run.pieces  # those that a continued run will ask for
    file = run.usable_checkpoint(1)
    assert file is not None
    assert file.name == f"step_{saved}-interrupted.ckpt"
    assert torch.load(file, weights_only=True)["global_step"] == saved
    # afterwards nothing waits any more
    assert not interruption._deferred
    continued = walk("opt", tmp_path, options=options(Interruption(), [], []), run=run)
    for index in range(2):
        expected, found = whole.file(index), continued.file(index)
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    assert not run.checkpoint_folder(1).parent.exists()


@both
def test_signal_outside_of_rounding_stops_at_once(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aespa_pl.block.search.fit_block_grids", lambda *_: send(number))
    interruption = Interruption()
    with pytest.raises(RunInterrupted), interruption.watching():
        walk("opt", tmp_path, options=options(interruption, [], []))
    assert Run.open(tmp_path / "runs" / "version_0").blocks == {}


def test_error_lets_signals_through_again(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_train_batch_start(self, *_: object) -> None:
            raise KeyError("something else")

    interruption = Interruption()
    with pytest.raises(KeyError), interruption.watching():
        walk("opt", tmp_path, options=options(interruption, [], [Fails()]))
    assert not interruption._deferred


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (EVERY_FIVE, [5, 10, 15, 20]),
        (
            OutputSettings(checkpoint_iterations=None, checkpoint_seconds=1e-9),
            list(range(1, LAST + 1)),
        ),
        (OutputSettings(checkpoint_iterations=None, checkpoint_seconds=3600.0), []),
        (OutputSettings(checkpoint_iterations=7, checkpoint_seconds=3600.0), [7, 14, 21]),
        (OutputSettings(checkpoint_iterations=None, checkpoint_seconds=None), []),
    ],
)
@pytest.mark.usefixtures("single_iterations")
def test_checkpoints_come_by_iterations_and_time(
    output: OutputSettings, expected: list[int], tmp_path: Path
) -> None:
    class Watch(Callback):
        def __init__(self) -> None:
            self.steps: list[int] = []

        def on_train_batch_start(self, trainer: Trainer, *_: object) -> None:
            self._look()

        def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self._look()

        def _look(self) -> None:
            run = Run.open(tmp_path / "runs" / "version_0")
            if run.checkpoint is not None and run.checkpoint["block"] == 0:
                run.pieces = run.checkpoint["pieces"]
                file = run.usable_checkpoint(0)
                assert file is not None
                self.steps.append(torch.load(file, weights_only=True)["global_step"])
                assert len(list(run.checkpoint_folder(0).iterdir())) == 1  # the older is removed

    watch = Watch()
    walk("opt", tmp_path, options=options(Interruption(), [watch], [], output))
    assert sorted(set(watch.steps)) == expected


def test_checkpoints_by_iterations_come_where_a_step_is_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aespa_pl.rounding.module.STEP_SECONDS", 3600.0)
    saved: list[int] = []

    class Note(Callback):
        def on_save_checkpoint(self, trainer: Trainer, *_: object) -> None:
            saved.append(trainer.global_step)

    walk("opt", tmp_path, options=options(Interruption(), [], [Note()]))
    assert saved == [5, 10, 15, 20] * 2
