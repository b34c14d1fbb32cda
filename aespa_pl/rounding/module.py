"""A Transformer block as a LightningModule whose parameters are its rounding variables."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn

from aespa_pl.algorithm.adaround import (
    RoundingLoss,
    SoftRounding,
    decide,
    penalty_exponent,
    rounding_loss,
    undecided,
)
from aespa_pl.algorithm.products import Precision, multiplying_in
from aespa_pl.algorithm.workspace import Workspace
from aespa_pl.distributed.rows import Shard
from aespa_pl.rounding.data import StatisticsBatch
from aespa_pl.settings import RoundingSettings

FIXED = ("lower", "base", "gain", "nearest")
"""Tensors of a projection that go with the module to its device, but not into its checkpoints: they
follow from the weights and the statistics."""

SUMS = ("reconstruction_loss", "rounding_loss")
"""Curves that are sums over the weights; the others are means."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's, in the shape of the rounding variables."""
STEP_SECONDS = 0.1
"""Of iterations in one Lightning step, whose own Python takes about a millisecond; signals wait so long."""


class NonFiniteLossError(ArithmeticError):
    """The loss of a projection is NaN or infinite."""


@dataclass(frozen=True)
class RoundingTask:
    """What one projection, or this process's part of it, brings to the rounding of its block."""

    rounding: SoftRounding
    start: Tensor
    """Rounding variables, ``[heads, rows, d_in]``; learning changes them in place."""
    nearest: Tensor
    """Integers of nearest rounding, uint8, which the curves compare with."""
    penalty: float
    """lambda."""


class BlockRounding(LightningModule):
    """Learns the rounding of all projections of one block; one iteration updates all of them.

    The projections don't depend on each other (algorithm.md, step 4), so the sum of their losses
    has the gradients of each.

    A Lightning step is as many iterations as fit into STEP_SECONDS, one at least. Lightning's
    ``global_step`` counts iterations, and what has to be done after certain ones is done after these:
    see ``rhythms``.
    """

    def __init__(
        self,
        tasks: Mapping[str, RoundingTask],
        settings: RoundingSettings,
        label: str,
        shards: Mapping[str, Shard] | None = None,
        precision: Precision = "float32",
    ) -> None:
        """Take the projections of one block.

        Args:
            tasks: By projection name.
            settings: Learning rate, iterations, schedule of the rounding loss.
            label: Name of the block in messages: ``block 3``.
            shards: Which rows of each projection the tasks are; None: all of them.
            precision: Of the products with the statistics, which are operands in it.
        """
        super().__init__()
        self.precision: Precision = precision
        self.automatic_optimization = False  # would be one iteration a step
        self.settings = settings
        self.label = label
        divided = {n: s for n, s in (shards or {}).items() if not s.ranks.alone}
        self.shards: Mapping[str, Shard] = divided
        self.penalties = {name: task.penalty for name, task in tasks.items()}
        self.levels = {name: task.rounding.levels for name, task in tasks.items()}
        self.variables = nn.ParameterDict(
            {name: nn.Parameter(task.start) for name, task in tasks.items()}
        )
        for name, task in tasks.items():
            fixed = (task.rounding.lower, task.rounding.base, task.rounding.gain, task.nearest)
            for kind, tensor in zip(FIXED, fixed, strict=True):
                self.register_buffer(f"{name}_{kind}", tensor, persistent=False)
        self.rhythms: list[int] = []
        """A Lightning step ends after each multiple of these numbers of iterations."""
        self._workspace = Workspace()
        self._learned: dict[str, tuple[Tensor, SoftRounding, Tensor]] = {}
        """While it trains, by projection: the variables, what is fixed, the variables' gradient."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam on the rounding variables (Section 4.1)."""
        return torch.optim.Adam(
            self.parameters(), lr=float(self.settings.learning_rate), fused=True
        )

    def on_train_start(self) -> None:
        """Let no step go beyond the iterations that Lightning's settings name."""
        self.rhythms += [self._log_interval, self.trainer.max_steps]
        for name, B in self.variables.items():  # on the device by now
            B.grad = torch.empty_like(B)  # made with the loss: there is nothing for autograd to do
            self._learned[name] = B.detach(), self.rounding(name), B.grad

    def training_step(self, batch: StatisticsBatch, batch_idx: int) -> Tensor:
        """Make iterations for a while; return the loss of all projections together."""
        until = time.perf_counter() + STEP_SECONDS
        with multiplying_in(self.precision):
            while True:
                loss = self._iterate(batch)
                done = self.global_step
                rest = any(done % rhythm == 0 for rhythm in self.rhythms)
                # with several processes each must know where the others are
                if rest or self.shards or time.perf_counter() >= until:
                    return loss

    def on_train_end(self) -> None:
        """Free what only iterations need, before others take memory."""
        self._workspace = Workspace()
        self._learned = {}
        for B in self.parameters():
            B.grad = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put all rows of the block into a checkpoint: any number of processes can go on with it.

        The first process writes it; the others have what they must give, and keep nothing.
        """
        self._change_rows(checkpoint, self._gather)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take this process's rows out of a checkpoint of the block."""
        self._change_rows(checkpoint, lambda shard, tensor: shard.part(tensor).clone())

    def rounding(self, name: str) -> SoftRounding:
        """Return the fixed part of a projection, on the module's device."""
        lower, base, gain, _ = (self.get_buffer(f"{name}_{kind}") for kind in FIXED)
        return SoftRounding(lower, base, gain, self.levels[name])

    @torch.no_grad()
    def integers(self) -> dict[str, Tensor]:
        """Return what has been learned, ``[heads, rows, d_in]`` by projection.

        Raises:
            NonFiniteLossError: A rounding variable is not a finite number.
        """
        for name, B in self.variables.items():
            if not bool(torch.isfinite(B).all()):
                raise NonFiniteLossError(f"{self.label}: the rounding of {name} diverged")
        return {name: decide(B, self.rounding(name)) for name, B in self.variables.items()}

    def _iterate(self, batch: StatisticsBatch) -> Tensor:
        """Make one iteration; return the loss before it."""
        s = self.settings
        beta = penalty_exponent(
            self.global_step, s.iterations, warmup=s.warmup, start=s.beta_start, end=s.beta_end
        )
        losses = {}
        for name, (B, fixed, gradient) in self._learned.items():
            H, G = batch[name]
            losses[name] = rounding_loss(
                B,
                fixed,
                H,
                G,
                weight=self.penalties[name],
                beta=beta,
                workspace=self._workspace,
                gradient=gradient,
                precision=self.precision,
            )
        parts = [part for loss in losses.values() for part in (loss.reconstruction, loss.penalty)]
        total = torch.stack(parts).sum()
        if (self.global_step + 1) % self._log_interval == 0:
            curves = self._curves(losses)
            if self.shards:
                curves = self._of_all_rows(curves)
                sums = [curves[f"{kind}/{name}"] for kind in SUMS for name in losses]
                total = torch.stack(sums).sum()
            self._report(curves)
        cast(LightningOptimizer, self.optimizers()).step()
        return total

    @property
    def _log_interval(self) -> int:
        interval: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        return interval

    def _curves(self, losses: Mapping[str, RoundingLoss]) -> dict[str, Tensor]:
        """Return the points of each projection's curves, KIND/NAME."""
        curves = {}
        for name, loss in losses.items():
            B = self.variables[name].detach()
            curves[f"reconstruction_loss/{name}"] = loss.reconstruction
            curves[f"rounding_loss/{name}"] = loss.penalty
            curves[f"undecided/{name}"] = undecided(B)
            differs = decide(B, self.rounding(name)) != self.get_buffer(f"{name}_nearest")
            curves[f"differs_from_nearest/{name}"] = differs.count_nonzero() / B.numel()
        return curves

    def _report(self, curves: Mapping[str, Tensor]) -> None:
        """Log the curves.

        Raises:
            NonFiniteLossError: A loss is NaN or infinite.
        """
        for name in self.variables:
            if not bool(torch.isfinite(curves[f"reconstruction_loss/{name}"])):
                raise NonFiniteLossError(f"{self.label}: the loss of {name} is not finite")
        values = {name: float(value) for name, value in curves.items()}
        # not through Lightning's logging, which counts its steps, and takes longer than 5 iterations
        for logger in self.loggers:
            logger.log_metrics(values, self.global_step + 1)
            logger.save()

    def _of_all_rows(self, curves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the curves of all rows of the projections from those of each process's."""
        weighted = []
        for curve, value in curves.items():
            kind, name = curve.split("/")
            fraction = self.shards[name].fraction  # 0 for rows of another process, learned in vain
            weighted.append(value * (float(fraction > 0) if kind in SUMS else fraction))
        total = torch.stack(weighted)
        next(iter(self.shards.values())).ranks.sum_(total)
        return dict(zip(curves, total, strict=True))

    def _gather(self, shard: Shard, part: Tensor) -> Tensor:
        whole = shard.whole(part)
        return whole.cpu() if shard.ranks.is_first else part

    def _change_rows(
        self, checkpoint: dict[str, Any], change: Callable[[Shard, Tensor], Tensor]
    ) -> None:
        """Replace what a checkpoint has of each projection: the variables, and Adam's moments."""
        if not self.shards:
            return
        names = [name.removeprefix("variables.") for name, _ in self.named_parameters()]
        variables = checkpoint["state_dict"]
        for name in names:
            key = f"variables.{name}"
            variables[key] = change(self.shards[name], variables[key])
        for optimizer in checkpoint.get("optimizer_states", []):
            # a new mapping: Adam's own is what the checkpoint holds
            optimizer["state"] = {
                i: {
                    key: change(self.shards[names[i]], tensor) if key in MOMENTS else tensor
                    for key, tensor in state.items()
                }
                for i, state in optimizer["state"].items()
            }
