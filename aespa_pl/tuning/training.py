"""Train parametrized weights by a LightningModule, with a rate for each kind, and keep the best epoch."""

import math
from typing import Any, NamedTuple, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from aespa_pl.algorithm.objectives import Precision, multiplying_in
from aespa_pl.curve_names import HELD_BACK, TRAINING, TUNING, tag
from aespa_pl.distributed.processes import ALONE
from aespa_pl.tuning.data import Pair, SegmentPairs
from aespa_pl.tuning.losses import Loss
from aespa_pl.tuning.omniquant import ChannelFactors, HeadMatrices
from aespa_pl.tuning.parametrization import RoundingPenalty, WeightParametrization, sharpness_at

EPSILON = 1e-15
"""Adam's epsilon. Gradients of latent values fall with the width, the number of tokens and the size of the
hidden states that a block adds to, and torch's 1e-8 would shorten the steps of those that are as small."""
WARMUP = 0.1
"""Share of the steps in which the learning rates rise."""
STATE = "tuning"
"""Key of a checkpoint under which the best epoch is stored."""
KEPT = ("start_error", "best_error", "best_epoch", "finite", "judged")
"""Names of the attributes that a checkpoint holds."""


class LearningRates(NamedTuple):
    """Holds the largest values of the one-cycle schedule."""

    latent: float
    """Rate of the latent values of weights, in distances of two integers where they are rounded to these."""
    others: float
    """Rate of the logarithms of scales, and of the weights of norms."""
    biases: float
    """Rate of biases; small models want it below the rate of the others."""
    transformations: float = 0.0
    """Rate of equivalent transformations."""
    bits: int | None = None
    """Bits that the rate of latent values is meant for; that of weights with other bits is in proportion to
    the distance of two integers in the same range. None: one rate for all."""

    def of_latent(self, bits: int) -> float:
        """Return the rate of the latent values of weights with so many bits."""
        if self.bits is None:
            return self.latent
        return self.latent * ((2.0**self.bits - 1) / (2.0**bits - 1))


class Tuning(LightningModule):
    """Trains a module whose weights are parametrized, and keeps the epoch that is best on held-back text.

    The start is a candidate too. Lightning's check before the training measures it, so the Trainer
    needs ``num_sanity_val_steps=-1``. Where several processes train it together, each has segments of its
    own, and all take the same steps, because gradients are averaged over the processes and errors added up.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        rates: LearningRates,
        penalty: RoundingPenalty | None = None,
        *,
        anneals: bool = False,
    ) -> None:
        """Take the module with its parametrizations; all that requires a gradient is trained.

        It is in evaluation mode, because the quantized model has no dropout. The penalty is added to the
        error, where rounding variables are learned. Latent values are rounded more and more sharply if it
        ``anneals``.
        """
        super().__init__()
        self.module = module
        self.loss = loss
        self.penalty = penalty
        self.anneals = anneals
        self.rates = rates
        self.world = ALONE  # the processes that train it together
        self.products: Precision = "float32"  # of the steps; errors that decide are in float32
        self.start_error = self.best_error = math.nan
        self.best_epoch = 0  # the start
        self.finite = True  # whether no epoch ended with an error that is NaN or infinite
        self.judged = 0  # number of epochs whose error is known
        self.visited_steps = 0  # optimizer steps of the checkpoint from which the training goes on
        # Not a ModelCheckpoint's best: the start is a candidate, which Lightning saves no checkpoint of, and
        # every checkpoint of a run has to hold the best epoch, so that one file is enough to resume.
        self._best: dict[str, Tensor] = {}
        self._errors: list[Tensor] = []
        self.strict_loading = False  # a checkpoint holds only trained parameters

    def configure_optimizers(self) -> Any:
        """Return Adam with a one-cycle learning rate."""
        groups = self._groups()
        adam = torch.optim.Adam([{"params": p, "lr": rate} for p, rate in groups], eps=EPSILON, fused=True)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            adam,
            [rate for _, rate in groups],
            total_steps=steps,
            pct_start=WARMUP if steps * WARMUP != 1 else 2 / steps,  # it divides by one step less
            cycle_momentum=False,
        )
        return {"optimizer": adam, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_start(self, batch: Pair, batch_idx: int) -> None:
        """Tell transformations and weights how far the training is."""
        self.enter_epoch(self.current_epoch + 1)
        if self.anneals:
            sharpness = sharpness_at(self.global_step, int(self.trainer.estimated_stepping_batches))
            for inner in self.module.modules():
                if isinstance(inner, WeightParametrization):
                    inner.sharpness = sharpness

    def training_step(self, batch: Pair, batch_idx: int) -> Tensor:
        """Return the loss of a mini-batch."""
        with multiplying_in(self.products):
            total, count = self.loss(self.module, batch)
        error: Tensor = total / count
        self.log(tag(TUNING, TRAINING), error)
        if self.penalty is None:
            return error
        steps = int(self.trainer.estimated_stepping_batches)
        return error + self.penalty.of(self.module, self.global_step, steps)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients in the precision of the loss's products."""
        with multiplying_in(self.products):
            super().backward(loss, *args, **kwargs)

    def on_after_backward(self) -> None:
        """Average the gradients of all processes; a process alone keeps its own."""
        if not self.world.alone:
            for parameter in trained(self.module).values():
                if parameter.grad is not None:
                    self.world.sum_(parameter.grad)
                    parameter.grad /= self.world.size

    def enter_epoch(self, epoch: int) -> None:
        """Let what changes over the training be as in an epoch, counted from 1; 0 is the start."""
        for inner in self.module.modules():
            if isinstance(inner, HeadMatrices):
                inner.enter_epoch(epoch)

    def validation_step(self, batch: Pair, batch_idx: int) -> None:
        """Add up the error of the segments that are held back."""
        self._errors.append(self.loss(self.module, batch))

    def on_validation_epoch_end(self) -> None:
        """Keep the epoch if it is the best so far; stop where the error is not finite."""
        if not self.trainer.sanity_checking:
            self.log(tag(TUNING, HELD_BACK), self._judge(self.current_epoch + 1))
        elif self.visited_steps:
            self._errors.clear()  # of what a checkpoint holds, which knows the start's error
        else:
            self._judge(0, step=0)  # Lightning logs nothing in its check

    def on_fit_start(self) -> None:
        """Measure the epoch at whose last step the checkpoint was written: Lightning leaves it out."""
        epoch, rest = divmod(self.visited_steps, self._pairs.steps)
        if not rest and epoch > self.judged:
            self._measure(epoch, self.visited_steps)

    def on_train_epoch_end(self) -> None:
        """Measure an epoch that Lightning has left out.

        It validates after a number of mini-batches, and counts them anew where a training goes on from the
        end of an epoch; a second interruption inside the next epoch then leaves the count too low.
        """
        if self.judged <= self.current_epoch:
            self._measure(self.current_epoch + 1, self.global_step)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the best epoch; leave out tensors that are not trained."""
        kept = {f"module.{name}" for name in trained(self.module)}
        tensors = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: t for name, t in tensors.items() if name in kept}
        checkpoint[STATE] = {name: getattr(self, name) for name in KEPT} | {"best": self._best}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the best epoch."""
        state = dict(checkpoint[STATE])
        self._best = state.pop("best")
        for name, value in state.items():
            setattr(self, name, value)
        self.visited_steps = checkpoint["global_step"]

    @torch.no_grad()
    def restore_best(self) -> None:
        """Give the module the parameters of the best epoch."""
        self.enter_epoch(self.best_epoch)
        for name, parameter in trained(self.module).items():
            parameter.copy_(self._best[name])

    def _groups(self) -> list[tuple[list[nn.Parameter], float]]:
        """Return the trained parameters with their learning rates; weights with other bits have their own."""
        latent, transforming = dict[int, float](), set[int]()
        for inner in self.module.modules():
            if isinstance(inner, ParametrizationList) and isinstance(inner[0], WeightParametrization):
                latent[id(inner.original)] = self.rates.of_latent(inner[0].bits)
            elif isinstance(inner, ChannelFactors):
                transforming.update(map(id, inner.parameters()))
        groups: dict[tuple[int, float], list[nn.Parameter]] = {}
        for name, parameter in trained(self.module).items():
            if id(parameter) in latent:
                kind, rate = 0, latent[id(parameter)]
            elif id(parameter) in transforming:
                kind, rate = 3, self.rates.transformations
            elif any(part.endswith("bias") for part in name.split(".")):  # also linear attention's dt_bias
                kind, rate = 2, self.rates.biases
            else:
                kind, rate = 1, self.rates.others
            # a plain number: a checkpoint that is read without unpickling can't hold the settings' own types
            groups.setdefault((kind, float(rate)), []).append(parameter)
        return [(groups[key], key[1]) for key in sorted(groups)]

    @property
    def _pairs(self) -> SegmentPairs:
        return cast(SegmentPairs, self.trainer.datamodule)  # type: ignore[attr-defined]

    @torch.no_grad()
    def _measure(self, epoch: int, step: int) -> None:
        """Judge an epoch, counted from 1, and log its error at a step."""
        self.enter_epoch(epoch)
        for batch in self._pairs.val_dataloader():
            here = self.trainer.strategy.batch_to_device(batch)
            self._errors.append(self.loss(self.module, here))
        self._judge(epoch, step)

    def _judge(self, epoch: int, step: int | None = None) -> float:
        """Return the error of an epoch, logged at a step; keep the parameters if it is the best so far."""
        summed = torch.stack(self._errors).double().sum(0)
        self._errors.clear()
        self.world.sum_(summed)
        total, count = summed.tolist()
        error = float(total / count)
        for logger in self.loggers if step is not None else ():
            logger.log_metrics({tag(TUNING, HELD_BACK): error}, step=step)
        self.judged = epoch
        if epoch == 0:
            self.start_error = error
        if epoch == 0 or error < self.best_error:
            self.best_error, self.best_epoch = error, epoch
            self._keep()
        if not math.isfinite(error):
            self.finite = False
            self.trainer.should_stop = True
        return error

    @torch.inference_mode()  # validation's own mode, whose tensors can't be written to outside of it
    def _keep(self) -> None:
        """Keep the parameters in host memory, where the best ones so far lie: a device may have no room."""
        for name, parameter in trained(self.module).items():
            if name in self._best:
                self._best[name].copy_(parameter)
            else:
                self._best[name] = parameter.to("cpu", copy=True)


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a module that require a gradient, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}
