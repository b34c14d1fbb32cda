"""A signal stops at once, or while a block is rounded after the iteration, with a checkpoint."""

import itertools
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from aespa_pl.run.interruption import SIGNALS, Interruption, RunInterrupted
from aespa_pl.run.journal import Run
from tests.run.stopping import LAST, options
from tests.walks import Quantized, same_files, walk

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


class Cycle:
    """Is freed by the collector alone, and a signal comes meanwhile."""

    def __init__(self) -> None:
        self.own = self

    def __del__(self) -> None:
        send(signal.SIGINT)


def test_a_signal_in_a_finalizer_is_not_lost() -> None:
    """Python prints and drops what a finalizer raises."""
    interruption = Interruption()
    with interruption.watching():
        Cycle()
        with pytest.raises(RunInterrupted, match="SIGINT"):
            interruption.free()
    with interruption.watching():
        interruption.defer(active=True)  # a second signal would not wait
        interruption.received = None
        Cycle()
        interruption.free()
        with pytest.raises(RunInterrupted, match="SIGINT"):
            interruption.check()


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    interruption = Interruption()
    with interruption.watching():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before
    interruption.defer(active=True)  # takes no signals any more
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_ignored_signal_stays_ignored() -> None:
    """The run goes on, as nohup wants it, when the terminal is closed."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interruption().watching():
            send(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    return walk("opt", tmp_path_factory.mktemp("whole"))


MOMENTS = [
    ("on_train_batch_start", 0, 1),
    ("on_train_batch_start", 7, 8),
    ("on_train_batch_start", LAST - 1, LAST),
    ("on_train_batch_end", 7, 8),  # after our callback: seen in the next iteration
    ("on_train_batch_end", LAST, LAST),  # there is no next one
    ("on_train_epoch_end", LAST, LAST),
]
"""Hooks and iterations in which a signal comes, and the iterations that its checkpoint has."""


@pytest.mark.filterwarnings("ignore:.*exists and is not empty.*")  # as on the command line
@pytest.mark.parametrize(
    ("number", "hook", "step", "saved"),
    [(number, *moment) for number, moment in zip(itertools.cycle(SIGNALS), MOMENTS, strict=False)],
)
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
    file = run.folder / run.checkpoint.file
    assert file.name == f"step_{saved}-interrupted.ckpt"
    assert torch.load(file, weights_only=True)["global_step"] == saved
    # afterwards nothing waits any more
    assert not interruption._deferred
    continued = walk("opt", tmp_path, options=options(Interruption(), [], []), run=run)
    same_files(continued, whole)
    assert not run.checkpoint_folder(1).parent.exists()


class SignalInValidation(Callback):
    """Sends a signal while the held-back segments are measured, after an epoch of the first block."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and trainer.current_epoch + 1 == self.epoch:
            send(signal.SIGTERM)


@pytest.mark.filterwarnings("ignore:.*exists and is not empty.*")  # as on the command line
@pytest.mark.parametrize("epoch", [1, 2])
def test_signal_in_a_validation_saves_after_it_and_goes_on_to_the_same_tensors(
    epoch: int, tmp_path: Path
) -> None:
    tuned = {
        "rounding.learn": "none",
        "tuning.blocks.enabled": True,
        "tuning.blocks.epochs": 2,
        "tuning.blocks.integer_rate": 0.002,
        "tuning.held_back": 0.3,  # 2 of 6 segments: an epoch has 4 steps
    }

    def tune(folder: Path, interruption: Interruption, *more: Callback, **run: Any) -> Quantized:
        saving = options(interruption, [], list(more))
        return walk("opt", tmp_path / folder, tuned, tuning_options=saving, **run)

    interruption = Interruption()
    with pytest.raises(RunInterrupted), interruption.watching():
        tune(Path("stopped"), interruption, SignalInValidation(epoch))
    run = Run.open(tmp_path / "stopped/runs/version_0")
    assert run.checkpoint is not None
    assert run.checkpoint.file.endswith(f"step_{4 * epoch}-interrupted.ckpt")
    continued = tune(Path("stopped"), Interruption(), run=run)
    same_files(continued, tune(Path("whole"), Interruption()))


@both
def test_signal_outside_of_rounding_stops_at_once(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aespa_pl.block.quantize.fit_grids", lambda *_: send(number))
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
