"""Train a model whose integers move on disk, so that it can be resumed from a checkpoint that lacks them."""

from typing import Any, cast

import torch

from aespa_pl.tuning.data import Pair
from aespa_pl.tuning.moving import Moves
from aespa_pl.tuning.training import Tuning


class MovingTuning(Tuning):
    """Trains a model whose integers move on disk; the files of best epoch and last checkpoint stay."""

    def __init__(self, moves: Moves, *arguments: Any) -> None:
        """Take further arguments as ``Tuning`` does."""
        super().__init__(*arguments)
        self.moves = moves
        self._needed: set[int] = set()

    def on_train_batch_start(self, batch: Pair, batch_idx: int) -> None:
        """Follow the schedule, and remove the files that nothing needs: a checkpoint is complete."""
        super().on_train_batch_start(batch, batch_idx)
        group = cast(torch.optim.Optimizer, self.optimizers()).param_groups[0]
        self.moves.share = group["lr"] / group["max_lr"]
        self.moves.keep({self.moves.step, self._best_step, *self._needed})

    def optimizer_step(self, *arguments: Any, **options: Any) -> None:
        """Take the step of the other parameters; the backward pass has moved the integers."""
        super().optimizer_step(*arguments, **options)
        self.moves.step += 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Note which files go with the checkpoint."""
        super().on_save_checkpoint(checkpoint)
        self._needed = {self.moves.step, self._best_step}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on from the files that go with the checkpoint."""
        super().on_load_checkpoint(checkpoint)
        self.moves.step = self.visited_steps
        self._needed = {self.moves.step, self._best_step}

    def restore_best(self) -> None:
        """Go back to the best epoch; the checkpoint counts until its result is written, so all files stay."""
        super().restore_best()
        self.moves.step = self._best_step

    @property
    def _best_step(self) -> int:
        return self.best_epoch * self._pairs.steps
