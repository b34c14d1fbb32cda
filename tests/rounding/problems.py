"""A Trainer learns the rounding of small problems."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from aespa_pl.algorithm.adaround import SoftRounding, start
from aespa_pl.algorithm.grid import search_grid
from aespa_pl.algorithm.quantizer import Grid, GridFormat
from aespa_pl.rounding import BlockRounding, ProjectionRounding, StatisticsDataModule
from aespa_pl.settings import RoundingSettings

SETTINGS = RoundingSettings(iterations=60, learning_rate=0.02, warmup=0.3, beta_start=12.0, beta_end=3.0)


@dataclass(frozen=True)
class Problem:
    """One projection, and what its loss needs."""

    weight: Tensor
    grid: Grid
    penalty: float
    H: Tensor
    G: Tensor | None

    @property
    def start(self) -> tuple[SoftRounding, Tensor]:
        return start(self.weight, self.weight, self.grid)


def problems() -> dict[str, Problem]:
    found = {}
    for name, heads in (("query", 2), ("fc", 1)):
        W = torch.randn(heads, 4, 6)
        X = torch.randn(6, 50)
        H = (X @ X.T)[None] / 25
        grid = search_grid(W, H, torch.ones(6), GridFormat(2))[0]
        K = torch.randn(heads, 9, 4)
        G = K.transpose(1, 2) @ K if name == "query" else None
        found[name] = Problem(W, grid, 0.1 * heads, H, G)
    return found


def module_of(given: Mapping[str, Problem], label: str = "block 0") -> BlockRounding:
    projections = {
        name: ProjectionRounding(p.weight, p.weight, p.grid, penalty=p.penalty) for name, p in given.items()
    }
    return BlockRounding(projections, SETTINGS, label)


def data_of(given: Mapping[str, Problem]) -> StatisticsDataModule:
    return StatisticsDataModule({name: (p.H, p.G) for name, p in given.items()})


class Learned(Callback):
    """Remembers the rounding variables at the end of the training, and the losses on the way."""

    def __init__(self) -> None:
        self.variables: dict[str, Tensor] = {}
        self.losses: dict[int, float] = {}

    def on_train_batch_end(self, trainer: Trainer, *arguments: Any) -> None:
        self.losses[trainer.global_step] = float(arguments[1]["loss"])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for key, value in pl_module.named_parameters():
            self.variables[key.split(".")[1]] = value.detach().clone()


def trainer(iterations: int = SETTINGS.iterations, **more: object) -> Trainer:
    quiet: dict[str, Any] = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    defaults: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "log_every_n_steps": 10}
    return Trainer(max_steps=iterations, max_epochs=-1, **(quiet | defaults | more))
