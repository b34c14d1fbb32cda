"""Keep on disk how far integers have moved, while a model is trained whose blocks are read when they run.

A latent value is the integer of the start plus an offset. A step is the gradient, divided by its root mean
square over row and column, times the learning rate. So there are no moments to keep, and a weight takes two
bytes: float16 holds an offset below 1/2 to a four-thousandth of the distance of two integers.

Source: "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost" (arXiv 1804.04235), without averages
over steps.
"""

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from aespa_pl.algorithm.quantizer import StoredWeight
from aespa_pl.distributed.processes import ALONE, World
from aespa_pl.models.family import BlockLayout
from aespa_pl.models.weights import projection_rows
from aespa_pl.storage.files import has_tensors, read_tensors, write_tensors
from aespa_pl.tuning.data import Pair
from aespa_pl.tuning.parametrization import WeightParametrization
from aespa_pl.tuning.training import Tuning

TINY = 1e-30
"""Least root mean square, so that gradients of zero stay zero."""
LARGEST = 3.0
"""Limit of a gradient relative to its root mean square, because single ones are far larger."""


class Moves:
    """Reads the offsets of a block, and writes them in a new file for each optimizer step."""

    def __init__(
        self,
        folder: Path,
        rate: Callable[[int], float],
        world: World = ALONE,
        saved: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Begin in a folder.

        ``rate`` returns the largest learning rate of weights with so many bits, ``saved`` the optimizer steps
        of the checkpoint that the training would be resumed from.
        """
        self.folder = folder
        self.rate = rate
        self.saved = saved
        self.world = world
        self.step = 0  # optimizer steps that have been taken; before the first one nothing has moved
        self.share = 0.0  # learning rate of the next step, relative to the largest

    def file(self, index: int) -> Path:
        """Return the file of a block's offsets, by the paths of its linear layers."""
        return self._of_step(self.step) / self.name(index)

    @staticmethod
    def name(index: int) -> str:
        """Return the name of a block's file in the folder of a step."""
        return f"block_{index:03}.safetensors"

    def has(self, steps: Collection[int], blocks: int) -> bool:
        """Tell whether the files of all blocks after each of the steps are whole; step 0 needs none."""
        names = [*map(self.name, range(blocks))]
        return all(has_tensors(self._of_step(step) / name) for step in steps if step for name in names)

    def read(self, index: int) -> dict[str, Tensor]:
        """Return the offsets of a block; empty before the first step."""
        return read_tensors(self.file(index)) if self.step else {}

    def apply(self, block: nn.Module, offsets: Mapping[str, Tensor]) -> None:
        """Give a block that was read from disk the latent values that it has learned."""
        for path, made in latents(block).items():
            latent = made.original.data
            # to the integers exactly: it is computed from the weight
            latent.copy_(cast(WeightParametrization, made[0]).nearest(latent))
            if offsets:
                latent += offsets[path].to(latent.device)

    def take_step(
        self, index: int, block: nn.Module, offsets: Mapping[str, Tensor], gradients: Sequence[Tensor]
    ) -> None:
        """Write the offsets of a block after a step, from the gradients of its ``latents``."""
        moved = {}
        for (path, made), gradient in zip(latents(block).items(), gradients, strict=True):
            self.world.sum_(gradient)
            rate = self.share * self.rate(cast(WeightParametrization, made[0]).bits)
            start = offsets[path].to(gradient) if offsets else torch.zeros_like(gradient)
            moved[path] = start.sub_(normalized(gradient), alpha=rate).half()
        if self.world.is_first:
            file = self._of_step(self.step + 1) / self.file(index).name
            write_tensors(file, moved, {})

    def keep(self, steps: Collection[int]) -> None:
        """Remove the files of all other steps."""
        if self.world.is_first:
            kept = {self._of_step(step) for step in steps}
            for folder in set(self.folder.glob("step_*")) - kept:
                shutil.rmtree(folder)

    def _of_step(self, step: int) -> Path:
        return self.folder / f"step_{step}"


class MovingTuning(Tuning):
    """Trains a model whose integers move on disk; the files of best epoch and last checkpoint stay.

    So it can be resumed from a checkpoint, which lacks them.
    """

    def __init__(self, moves: Moves, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.moves = moves
        self._best_of: dict[int, set[int]] = {}  # steps of the best epochs, by that of each checkpoint

    def on_train_batch_start(self, batch: Pair, batch_idx: int) -> None:
        """Follow the schedule, and remove the files that nothing needs: a checkpoint is complete."""
        super().on_train_batch_start(batch, batch_idx)
        group = cast(torch.optim.Optimizer, self.optimizers()).param_groups[0]
        self.moves.share = group["lr"] / group["max_lr"]
        # callbacks of the user's save checkpoints as well, from which nothing is resumed
        saved = self.moves.saved()
        resumed = () if saved not in self._best_of else (saved, *self._best_of[saved])
        self.moves.keep({self.moves.step, self._best_step, *resumed})

    def optimizer_step(self, *arguments: Any, **options: Any) -> None:
        """Take the step of the other parameters; the backward pass has moved the integers."""
        super().optimizer_step(*arguments, **options)
        self.moves.step += 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Note which files go with the checkpoint."""
        super().on_save_checkpoint(checkpoint)
        # callbacks may save at one step before and after a validation
        self._best_of.setdefault(self.moves.step, set()).add(self._best_step)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on from the files that go with the checkpoint."""
        super().on_load_checkpoint(checkpoint)
        self.moves.step = self.visited_steps
        self._best_of = {self.moves.step: {self._best_step}}

    def restore_best(self) -> None:
        """Go back to the best epoch; the checkpoint counts until its result is written, so all files stay."""
        super().restore_best()
        self.moves.step = self._best_step

    @property
    def _best_step(self) -> int:
        return self.best_epoch * self._pairs.steps


def normalized(gradient: Tensor) -> Tensor:
    """Return a gradient ``[rows, columns]`` over its root mean square, as a product of rows and columns."""
    squares = gradient.square()
    rows, columns = squares.mean(1, keepdim=True), squares.mean(0, keepdim=True)
    size = (rows / rows.mean().clamp(min=TINY)).sqrt() * columns.sqrt()
    return (gradient / size.clamp_(min=TINY)).clamp_(-LARGEST, LARGEST)


def latents(block: nn.Module) -> dict[str, ParametrizationList]:
    """Return the parametrizations of a block whose latent values are learned, by the paths of the layers."""
    return {
        path.removesuffix(".parametrizations.weight"): made
        for path, made in block.named_modules()
        if isinstance(made, ParametrizationList)
        and isinstance(made[0], WeightParametrization)
        and made.original.requires_grad
    }


def moved(
    weights: Mapping[str, StoredWeight], layout: BlockLayout, offsets: Mapping[str, Tensor]
) -> dict[str, StoredWeight]:
    """Return the weights of a block, by projection, with the integers that they have moved to."""
    found: dict[str, StoredWeight] = {}
    for p in layout.projections:
        offset = projection_rows(offsets[p.module], layout, p).flatten(0, 1)
        found[p.name] = weights[p.name].moved(offset)
    return found
