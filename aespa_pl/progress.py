"""Show how far a run is: a bar over blocks, one over iterations, and a line for each block."""

from importlib.util import find_spec
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich import progress as bars
from rich.console import Console
from rich.text import Text

from aespa_pl.errors import printable


class PlainConsole(Console):
    """Prints texts as they are: a name from a run or a file changes no colour and moves no cursor."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text without control characters."""
        return super().render_str("\n".join(map(printable, text.split("\n"))), **options)


class WalkProgress:
    """Shows the progress of a walk over blocks: bars in a terminal only, lines everywhere.

    Where it is ``terse``, as in a cell of a comparison, its lines are warnings alone.
    """

    def __init__(self, console: Console, *, terse: bool = False) -> None:
        self.console, self.terse = console, terse
        # rich needs another package to draw bars in a notebook
        in_notebook = console.is_jupyter and find_spec("ipywidgets") is not None
        self._bars = bars.Progress(
            bars.TextColumn("{task.description:<34}", markup=False),
            bars.BarColumn(bar_width=30),
            bars.MofNCompleteColumn(),
            bars.TimeElapsedColumn(),
            bars.TextColumn("left"),
            bars.TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not (console.is_terminal or in_notebook),
        )
        self._outer = self._bars.add_task("", visible=False)
        self._inner = self._bars.add_task("", visible=False)
        self._iterating = False

    def __enter__(self) -> "WalkProgress":
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def say(self, line: str) -> None:
        """Print a line above the bars, unless it is terse."""
        if not self.terse:
            self.warn(line)

    def warn(self, line: str) -> None:
        """Print a line above the bars, also where it is terse."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def begin(self, description: str, total: int) -> None:
        """Start the outer bar from 0."""
        self._bars.reset(self._outer, description=description, total=total, visible=True)
        self._bars.update(self._inner, visible=False)

    def left(self, words: str) -> None:
        """Say beside the outer bar how long the rest takes."""
        self._bars.update(self._outer, description=words.partition(" (")[0])

    def advance(self) -> None:
        """Move the outer bar by one block."""
        self._bars.update(self._inner, visible=False)
        self._bars.advance(self._outer)

    def phase(self, name: str) -> None:
        """Name the step under way on the inner bar, whose end is not known."""
        self._iterating = False
        self._bars.reset(self._inner, description=f"  {name}", total=None, visible=True)

    def step(self, description: str, done: int, total: int) -> None:
        """Show the inner bar at ``done`` of ``total``; its clock starts with each new step."""
        if not self._iterating:
            self._iterating = True
            self._bars.reset(self._inner, total=total)  # a bar that was full stands still otherwise
        self._bars.update(self._inner, description=description, completed=done, total=total, visible=True)


class IterationProgress(Callback):
    """Moves the inner bar with the iterations of a block."""

    def __init__(self, progress: WalkProgress, name: str = "rounding") -> None:
        self.progress, self.name = progress, name

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show iteration and loss, as often as the losses are logged."""
        done = trainer.global_step
        interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        total = int(trainer.estimated_stepping_batches)
        if done % interval == 0 or done == total:
            self.progress.step(f"  {self.name}, loss {float(outputs['loss']):.5g}", done, total)
