"""Run step 4 as a Lightning training, which learns the rounding variables of a block."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn

from aespa_pl.algorithm.adaround import (
    RoundingLoss,
    decide,
    penalty_exponent,
    rectified_sigmoid,
    rounding_loss,
    start,
    undecided,
)
from aespa_pl.algorithm.objectives import Precision, multiplying_in
from aespa_pl.algorithm.quantizer import Grid, quantize
from aespa_pl.algorithm.workspace import Workspace
from aespa_pl.curve_names import NOT_NEAREST, PENALTY, RECONSTRUCTION, ROUNDING_VARIABLES, UNDECIDED, tag
from aespa_pl.distributed.processes import RowShare
from aespa_pl.errors import NumericalError
from aespa_pl.settings import RoundingSettings

SUMS = (RECONSTRUCTION, PENALTY)
"""Curves that are sums over the weights; the others are means. TensorBoard sorts by name: losses first."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of Adam's moments, which have the shape of the rounding variables."""
StatisticsBatch = Mapping[str, tuple[Tensor, Tensor | None]]
"""Damped Hessian ``[heads or 1, d_in, d_in]`` of each projection, and G ``[heads, d_h, d_h]`` or None."""
EPOCH = 100
"""Iterations of what Lightning calls an epoch: EarlyStopping and others act at the end of each."""


def epochs_of(iterations: int) -> int:
    """Return the number of epochs that so many iterations make; the last may be shorter."""
    return -(-iterations // EPOCH)


class Repetition(list[StatisticsBatch]):
    """Holds one epoch: the objective of all calibration tokens, once for each iteration.

    Lightning counts from where a checkpoint was in its epoch; it asks a loader for a state to trust it there.
    """

    def state_dict(self) -> dict[str, int]:
        """Return nothing: all items are the same."""
        return {}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Do nothing."""


class StatisticsDataModule(LightningDataModule):
    """Delivers the statistics of a block again and again; they are on the device.

    Each batch is all of the calibration data: gradients have no sampling noise (Section 3.5 of the paper).
    """

    def __init__(self, batch: StatisticsBatch) -> None:
        """Take the only batch."""
        super().__init__()
        self.batch = batch

    def train_dataloader(self) -> Repetition:
        """Return what Trainer.fit reads."""
        return Repetition([self.batch] * EPOCH)

    def transfer_batch_to_device(self, batch: StatisticsBatch, *_: Any) -> StatisticsBatch:
        """Return the batch itself."""
        return batch


class ProjectionRounding(nn.Module):
    """Rounds a projection softly, or the rows of it that this process learns.

    Only the variables are stored in checkpoints; the fixed tensors follow from weights and grid.
    """

    def __init__(
        self, weight: Tensor, updated: Tensor, grid: Grid, *, penalty: float, share: RowShare | None = None
    ) -> None:
        """Begin between the two integers beside each weight ``[heads, rows, d_in]`` of OPTQ's ``updated``.

        The ``penalty`` is the weight lambda of the rounding loss; ``share`` says which rows these are.
        """
        super().__init__()
        # no buffers: they are where the block was run, on the device, and stay there
        self.fixed, variables = start(weight, updated, grid)
        self.nearest = quantize(weight, grid).to(torch.uint8)
        # memory that lives as long as the variables: new memory each iteration costs a CPU more
        self.gradient = torch.empty_like(variables)
        self.penalty = penalty
        self.share = share or RowShare(weight.shape[0], weight.shape[1], by_heads=True)
        self.variables = nn.Parameter(variables)

    @torch.no_grad()
    def loss(self, H: Tensor, G: Tensor | None, beta: float | None, workspace: Workspace) -> RoundingLoss:
        """Return ``rounding_loss`` with the damped H, an ``operand``; its gradient is in ``gradient``."""
        return rounding_loss(
            self.variables, self.fixed, H, G,
            weight=self.penalty, beta=beta, workspace=workspace, gradient=self.gradient,
        )  # fmt: skip

    @torch.no_grad()
    def decisions(self) -> dict[str, Tensor]:
        """Return the share of variables still undecided, and of integers that are not the nearest."""
        differs = (decide(self.variables, self.fixed) != self.nearest).count_nonzero()
        return {UNDECIDED: undecided(self.variables), NOT_NEAREST: differs / self.variables.numel()}


class BlockRounding(LightningModule):
    """Learns the rounding of the projections of one block; one iteration updates all of them.

    They don't depend on each other (docs/algorithm.md, step 4): the sum of losses has the gradients of each.
    """

    def __init__(
        self,
        projections: Mapping[str, ProjectionRounding],
        settings: RoundingSettings,
        label: str,
        precision: Precision = "float32",
    ) -> None:
        """Take the soft rounding of the projections of one block, by name.

        The ``label`` names the block in messages: ``block 3``. The statistics are operands in ``precision``.
        """
        super().__init__()
        self.projections = nn.ModuleDict(projections)
        self.settings = settings
        self.label = label
        self.precision: Precision = precision
        self._workspace = Workspace()
        self._decided: dict[str, Tensor | None] = {}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam on the rounding variables (Section 4.1 of the paper)."""
        return torch.optim.Adam(self.parameters(), lr=float(self.settings.learning_rate), fused=True)

    def training_step(self, batch: StatisticsBatch, batch_idx: int) -> Tensor:
        """Return the loss of all projections together; their gradients are made on the way.

        A NumericalError says that a loss is not finite, which is looked at whenever curves are logged.
        """
        s = self.settings
        beta = penalty_exponent(
            self.global_step, s.iterations, warmup=s.warmup, start=s.beta_start, end=s.beta_end
        )
        with multiplying_in(self.precision):
            losses = {
                name: projection.loss(*batch[name], beta, self._workspace)
                for name, projection in self.named_projections()
            }
        if (self.global_step + 1) % self.trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            return self._report(losses)
        parts = [part for loss in losses.values() for part in (loss.reconstruction, loss.penalty)]
        return torch.stack(parts).sum()

    def backward(self, loss: Tensor, *_: Any, **__: Any) -> None:
        """Hand the gradients to the optimizer: the products of the losses gave them already."""
        for _name, projection in self.named_projections():
            projection.variables.grad = projection.gradient

    def optimizer_zero_grad(self, *_: Any, **__: Any) -> None:
        """Do nothing: ``backward`` replaces gradients, it does not add to them."""

    def on_train_end(self) -> None:
        """Decide the integers on the device, and free everything else there.

        Lightning moves to host memory what a module and its optimizer hold when training has ended.
        """
        self._decide()
        self.projections = nn.ModuleDict()
        self._workspace = Workspace()
        optimizer = cast(torch.optim.Optimizer, self.optimizers(use_pl_optimizer=False))
        optimizer.state.clear()
        optimizer.param_groups[0]["params"] = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put all rows into the first process's checkpoint: any number of processes can go on with it."""
        self._change_rows(checkpoint, _gather)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take this process's rows out of a checkpoint of the block."""
        self._change_rows(checkpoint, lambda share, tensor: share.part(tensor).clone())

    def named_projections(self) -> Iterable[tuple[str, ProjectionRounding]]:
        """Return name and soft rounding of each projection."""
        return cast(Iterable[tuple[str, ProjectionRounding]], self.projections.items())

    def integers(self) -> dict[str, Tensor]:
        """Return what has been learned once training has ended, ``[heads, rows, d_in]`` by projection.

        A NumericalError says that a rounding variable was not a finite number.
        """
        if not self._decided:  # after a checkpoint of the last iteration Lightning trains nothing
            self._decide()
        found = {}
        for name, decided in self._decided.items():
            if decided is None:
                raise NumericalError(f"{self.label}: the rounding of {name} diverged")
            found[name] = decided
        return found

    def _decide(self) -> None:
        named = dict(self.named_projections())
        finite = torch.stack([p.variables.isfinite().all() for p in named.values()]).tolist()
        for (name, projection), usable in zip(named.items(), finite, strict=True):
            self._decided[name] = decide(projection.variables, projection.fixed) if usable else None

    def _report(self, losses: Mapping[str, RoundingLoss]) -> Tensor:
        """Log the curves of all rows of the block, and return the loss of all of them."""
        curves = {}
        for name, projection in self.named_projections():
            curves[tag(RECONSTRUCTION, name)] = losses[name].reconstruction
            curves[tag(PENALTY, name)] = losses[name].penalty
            curves |= {tag(kind, name): share for kind, share in projection.decisions().items()}
        curves = self._of_all_rows(curves)
        # all at once: the host waits for the device here, and nowhere else while it learns
        values = dict(zip(curves, torch.stack(list(curves.values())).tolist(), strict=True))
        for name in losses:
            if not math.isfinite(values[tag(RECONSTRUCTION, name)]):
                raise NumericalError(f"{self.label}: the loss of {name} is not finite")
        total = torch.stack([curves[tag(kind, name)] for kind in SUMS for name in losses]).sum()
        self.log_dict({"loss": total, **values})
        return total

    def _of_all_rows(self, curves: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the curves of all rows of the projections from the curves of each process's rows."""
        shares = {name: projection.share for name, projection in self.named_projections()}
        world = next(iter(shares.values())).world
        if world.alone:
            return curves
        weighted = []
        for curve, value in curves.items():
            kind, name = curve.split("/")
            fraction = shares[name].fraction  # 0 for rows of another process, learned in vain
            weighted.append(value * (float(fraction > 0) if kind in SUMS else fraction))
        total = torch.stack(weighted)
        world.sum_(total)
        return dict(zip(curves, total, strict=True))

    def _change_rows(self, checkpoint: dict[str, Any], change: Callable[[RowShare, Tensor], Tensor]) -> None:
        """Replace the variables and Adam's moments of each projection in a checkpoint."""
        named = dict(self.named_projections())
        if all(projection.share.world.alone for projection in named.values()):
            return
        state = checkpoint["state_dict"]
        for name, projection in named.items():
            key = f"projections.{name}.variables"
            state[key] = change(projection.share, state[key])
        for optimizer in checkpoint.get("optimizer_states", []):
            shares = [projection.share for projection in named.values()]
            # new mappings: Adam's own are what the checkpoint holds
            optimizer["state"] = {
                i: moments | {key: change(shares[i], moments[key]) for key in MOMENTS}
                for i, moments in optimizer["state"].items()
            }


def _gather(share: RowShare, part: Tensor) -> Tensor:
    whole = share.whole(part)
    return whole.cpu() if share.world.is_first else part


class RoundingHistograms(Callback):
    """Logs h(B) of chosen projections in TensorBoard with the curves: of several processes, the first's."""

    def __init__(self, projections: Collection[str]) -> None:
        """Choose projections by name."""
        self.projections = projections

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Log, where curves are logged."""
        step = trainer.global_step
        if step % trainer.log_every_n_steps and step != 1:  # type: ignore[attr-defined]
            return
        boards = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        for name, projection in cast(BlockRounding, pl_module).named_projections():
            if name.partition("_heads_")[0] in self.projections:  # of one that is learned in portions
                values = rectified_sigmoid(projection.variables.detach()).flatten()
                for board in boards if trainer.is_global_zero else ():
                    board.experiment.add_histogram(tag(ROUNDING_VARIABLES, name), values, step)
