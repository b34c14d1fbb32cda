"""A Transformer block as a LightningModule whose parameters are its rounding variables."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from aespa_pl.algorithm.adaround import (
    RoundingLoss,
    SoftRounding,
    decide,
    penalty_exponent,
    rectified_sigmoid,
    rounding_loss,
)
from aespa_pl.algorithm.workspace import Workspace
from aespa_pl.rounding.data import StatisticsBatch
from aespa_pl.settings import RoundingSettings

FIXED = ("lower", "base", "gain", "nearest")
"""Tensors of a projection that go with the module to its device, but not into its checkpoints: they
follow from the weights and the statistics."""


class NonFiniteLossError(ArithmeticError):
    """The loss of a projection is NaN or infinite."""


@dataclass(frozen=True)
class RoundingTask:
    """What one projection brings to the rounding of its block."""

    rounding: SoftRounding
    start: Tensor
    """Rounding variables, ``[heads, rows, d_in]``; learning changes them in place."""
    nearest: Tensor
    """Integers of nearest rounding, uint8, which the curves compare with."""
    penalty: float
    """lambda."""


class BlockRounding(LightningModule):
    """Learns the rounding of all projections of one block; one step updates all of them.

    The projections don't depend on each other (algorithm.md, step 4), so the sum of their losses
    has the gradients of each.
    """

    def __init__(
        self, tasks: Mapping[str, RoundingTask], settings: RoundingSettings, label: str
    ) -> None:
        """Take the projections of one block.

        Args:
            tasks: By projection name.
            settings: Learning rate, iterations, schedule of the rounding loss.
            label: Name of the block in messages: ``block 3``.
        """
        super().__init__()
        self.settings = settings
        self.label = label
        self.penalties = {name: task.penalty for name, task in tasks.items()}
        self.levels = {name: task.rounding.levels for name, task in tasks.items()}
        self.variables = nn.ParameterDict(
            {name: nn.Parameter(task.start) for name, task in tasks.items()}
        )
        for name, task in tasks.items():
            fixed = (task.rounding.lower, task.rounding.base, task.rounding.gain, task.nearest)
            for kind, tensor in zip(FIXED, fixed, strict=True):
                self.register_buffer(f"{name}_{kind}", tensor, persistent=False)
        self._workspace = Workspace()
        self._gradients: dict[str, Tensor] = {}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam on the rounding variables (Section 4.1)."""
        return torch.optim.Adam(
            self.parameters(), lr=float(self.settings.learning_rate), fused=True
        )

    def training_step(self, batch: StatisticsBatch, batch_idx: int) -> Tensor:
        """Return the loss of all projections together."""
        s = self.settings
        beta = penalty_exponent(
            self.global_step, s.iterations, warmup=s.warmup, start=s.beta_start, end=s.beta_end
        )
        losses, total = {}, torch.zeros((), device=self.device)
        for name, B in self.variables.items():
            H, G = batch[name]
            losses[name] = loss = rounding_loss(
                B.detach(),
                self.rounding(name),
                H,
                G,
                weight=self.penalties[name],
                beta=beta,
                workspace=self._workspace,
                gradient=self._workspace.like(f"gradient of {name}", B.detach()),
            )
            total += loss.reconstruction + loss.penalty
        self._gradients = {name: loss.gradient for name, loss in losses.items()}
        interval: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if (self.global_step + 1) % interval == 0:  # the iterations that Lightning logs
            self._report(losses)
        return total

    def backward(self, loss: Tensor, *_: Any, **__: Any) -> None:
        """Hand over the gradients, which came with the loss: there is nothing for autograd to do."""
        for name, B in self.variables.items():
            B.grad = self._gradients[name]

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

    def _report(self, losses: Mapping[str, RoundingLoss]) -> None:
        """Log the curves of each projection.

        Raises:
            NonFiniteLossError: A loss is NaN or infinite.
        """
        curves = {}
        for name, loss in losses.items():
            if not bool(torch.isfinite(loss.reconstruction)):
                raise NonFiniteLossError(f"{self.label}: the loss of {name} is not finite")
            h = rectified_sigmoid(self.variables[name].detach())
            curves[f"reconstruction_loss/{name}"] = loss.reconstruction
            curves[f"rounding_loss/{name}"] = loss.penalty
            curves[f"undecided/{name}"] = ((h > 0.1) & (h < 0.9)).float().mean()
            chosen = decide(self.variables[name].detach(), self.rounding(name))
            differs = chosen != self.get_buffer(f"{name}_nearest")
            curves[f"differs_from_nearest/{name}"] = differs.float().mean()
        self.log_dict(curves)
