"""The command line: ``aespa-pl fit`` quantizes a model, ``aespa-pl test`` measures it."""

import logging
import shlex
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import ArgumentError
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from rich.table import Table

from aespa_pl.commands import evaluate, fit
from aespa_pl.commands.evaluate import LAST
from aespa_pl.commands.job import Job
from aespa_pl.commands.trainers import (
    BlockTrainers,
    check_strategy,
    check_trainer,
    walk_loggers,
)
from aespa_pl.distributed.launch import (
    LONGEST_WAIT,
    RowsStrategy,
    end_with_launcher,
    launch,
)
from aespa_pl.distributed.processes import PeerLostError, Ranks
from aespa_pl.errors import UserError
from aespa_pl.models import family_of
from aespa_pl.models.headers import read_config
from aespa_pl.models.hub import resolve
from aespa_pl.planning.table import plan
from aespa_pl.progress import WalkProgress
from aespa_pl.run.interruption import Interruption, RunInterrupted
from aespa_pl.settings import DataSettings, ModelSettings, OutputSettings, QuantizationSettings
from aespa_pl.storage.files import write_text

MEASURING_SECONDS = 30.0
"""For the estimate of ``plan``."""
FIRST_TO_SPEAK_SECONDS = 10.0
"""That other processes wait before they end with a message: what is wrong for all, the first one says,
and its end is theirs."""
TRAINER_DEFAULTS = {
    "accelerator": "auto",
    "devices": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": True,
    "log_every_n_steps": 20,
}


class BlockTrainer(Trainer):
    """The Trainer of one block; what it does with a module and its data is Lightning's."""

    def fit(self, *args: Any, **kwargs: Any) -> None:
        """Quantize a model block by block."""
        super().fit(*args, **kwargs)

    def test(self, *args: Any, **kwargs: Any) -> Any:
        """Measure the perplexity of the original and of the quantized model."""
        return super().test(*args, **kwargs)

    def plan(self) -> None:
        """Tell what fit would need: memory, disk, arithmetic, time."""


class AespaCLI(LightningCLI):
    """Sections ``model``, ``data``, ``quantization``, ``output`` and ``trainer`` of a YAML file."""

    def __init__(self, interruption: Interruption, **kwargs: Any) -> None:
        """Parse the arguments and run the command.

        Args:
            interruption: Tells when the user or the system wants us to stop.
            kwargs: Those of LightningCLI.
        """
        self.interruption = interruption
        super().__init__(**kwargs)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the commands; none of the arguments of the Trainer's methods of that name is used."""
        fit = {
            "model",
            "train_dataloaders",
            "val_dataloaders",
            "datamodule",
            "ckpt_path",
            "weights_only",
        }
        test = {"model", "dataloaders", "ckpt_path", "verbose", "datamodule", "weights_only"}
        return {"fit": fit, "test": test, "plan": set()}

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the settings and the Trainer."""
        parser.add_class_arguments(ModelSettings, "model")
        parser.add_class_arguments(DataSettings, "data")
        parser.add_class_arguments(QuantizationSettings, "quantization")
        parser.add_class_arguments(OutputSettings, "output")
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        parser.set_defaults({f"trainer.{key}": value for key, value in TRAINER_DEFAULTS.items()})

    def instantiate_classes(self) -> None:
        """Make the settings, and one Trainer that tells the device; each block gets its own later."""
        self.config_init = self.parser.instantiate(self.config)
        self.settings = self.config_init[self.subcommand]
        check_trainer(self.settings.trainer)
        self.model = self.datamodule = None
        try:
            self.trainer = self.instantiate_trainer(logger=False, callbacks=[])
            check_strategy(self.trainer, self.settings.trainer.strategy)
            if isinstance(self.trainer.strategy, DDPStrategy):
                self.trainer = self.instantiate_trainer(
                    logger=False, callbacks=[], strategy=RowsStrategy(timeout=LONGEST_WAIT)
                )
        # a RuntimeError is what Lightning makes of SLURM's variables that do not fit
        except (
            MisconfigurationException, ValueError, TypeError, ImportError, RuntimeError
        ) as error:  # fmt: skip
            raise UserError(f"trainer: {error}") from error

    def fit(self, **_: Any) -> None:
        """Quantize, and print what came out."""
        job = self._job()  # before other processes: most mistakes are noticed here
        ranks, console = self._launch()
        with WalkProgress(console) as progress:
            run, metrics = fit.fit(
                job,
                self.settings.ckpt_path,
                make_trainer=self._block_trainers(progress, ranks).of_portion,
                make_loggers=partial(walk_loggers, self.settings.trainer.logger),
                save_config=self._save_config,
                progress=progress,
                ranks=ranks,
            )
        _print_perplexities(console, metrics["perplexity"])
        console.print(
            f"{metrics['seconds']['quantization']:.0f} s for the quantization", highlight=False
        )
        console.print(f"quantized model: {run.model_folder}", highlight=False, soft_wrap=True)
        console.print(str(run.folder), highlight=False, soft_wrap=True)

    def test(self, **_: Any) -> None:
        """Measure, and print what came out."""
        job = self._job()
        ranks, console = self._launch()
        which = self.settings.ckpt_path or LAST
        with WalkProgress(console) as progress:
            folder, metrics = evaluate.test(job, which, progress, ranks)
        _print_perplexities(console, metrics["perplexity"])
        console.print(str(folder), highlight=False, soft_wrap=True)

    def plan(self, **_: Any) -> None:
        """Print what a run needs; the model's config.json is all that is read of it."""
        s = self.settings
        config = read_config(resolve(s.model.pretrained, s.model.revision, weights=False))
        rows = plan(
            config,
            family_of(config),
            data=s.data,
            quantization=s.quantization,
            device=self.trainer.strategy.root_device,
            dtype=None if s.model.dtype == "auto" else getattr(torch, s.model.dtype),
            seconds=MEASURING_SECONDS,
        )
        table = Table(show_header=False, box=None)
        for row in rows:
            table.add_row(*row)
        Console().print(table, highlight=False)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the run to go on with."""
        parser.add_argument(
            "--ckpt_path",
            type=str | None,
            default=None,
            help="last (the newest of output.folder/output.name) or the folder of a run. fit: continue "
            "this run; without it, a new one starts. test: measure this run; without it, the last.",
        )

    def _job(self) -> Job:
        s = self.settings
        return Job.prepare(
            s.model, s.data, s.quantization, s.output, self.trainer.strategy.root_device
        )

    def _launch(self) -> tuple[Ranks, Console]:
        """Start the other processes; return all of them, and where this one writes."""
        ranks = launch(self.trainer)
        if not ranks.is_first:
            logging.getLogger("aespa_pl").setLevel(logging.ERROR)  # the first has the same warnings
        return ranks, Console(quiet=not ranks.is_first)

    def _block_trainers(self, progress: WalkProgress, ranks: Ranks) -> BlockTrainers:
        return BlockTrainers(
            # made anew for each block: loggers and callbacks keep a state
            section=lambda: self.parser.instantiate(self.config)[self.subcommand].trainer,
            instantiate=self.instantiate_trainer,
            first=self.trainer,
            output=self.settings.output,
            iterations=self.settings.quantization.rounding.iterations,
            interruption=self.interruption,
            progress=progress,
            ranks=ranks,
        )

    def _save_config(self, folder: Path) -> None:
        """Write the configuration as it was run; the file runs again, and continues this run."""
        text = self.parser.dump(self.config, skip_unset=False)
        content = yaml.safe_load(text)[self.subcommand]
        for key in ("config", "ckpt_path"):
            content.pop(key, None)
        path = folder / "config.yaml"
        write_text(path, yaml.safe_dump(content, sort_keys=False))
        self.interruption.how_to_continue = (
            f"aespa-pl fit --config {shlex.quote(str(path))} --ckpt_path {shlex.quote(str(folder))}"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; a mistake of the user ends with one line and status 2."""
    quiet_libraries()
    end_with_launcher()
    torch.set_float32_matmul_precision("highest")  # whatever the environment says
    commands_kwargs = {name: {"exit_on_error": False} for name in AespaCLI.subcommands()}
    interruption = Interruption()
    try:
        with interruption.watching():
            AespaCLI(
                interruption,
                trainer_class=BlockTrainer,
                save_config_callback=None,
                seed_everything_default=False,
                auto_configure_optimizers=False,
                load_from_checkpoint_support=False,
                parser_kwargs={
                    "prog": "aespa-pl",
                    "description": "Quantize the weights of a language model with aespa.",
                    "exit_on_error": False,
                    "allow_abbrev": False,
                    **commands_kwargs,
                },
                args=list(arguments) if arguments is not None else None,
            )
    except (ArgumentError, UserError) as error:
        _stop(str(error), 2)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        advice = interruption.how_to_continue
        _stop(
            f"{where}{error.strerror or error}"
            + (f"; once that is mended, continue with: {advice}" if advice else ""),
            2,
        )
    except PeerLostError as error:
        advice = interruption.how_to_continue
        _stop(
            f"another process of this run has ended or cannot be reached: {error}"
            + (f"; continue with: {advice}" if advice else ""),
            1,
        )
    except torch.OutOfMemoryError as error:
        _stop(f"out of memory on the device: {error}. Lower data.batch_size", 2)
    except MemoryError:
        _stop("out of memory: lower data.batch_size or data.calibration.segments", 2)
    except RunInterrupted as error:
        advice = interruption.how_to_continue
        _stop(
            f"stopped by {error}; "
            + (f"continue with: {advice}" if advice else "no run had begun"),
            128 + error.number,
        )


def _stop(message: str, status: int) -> None:
    """End with one line."""
    if getattr(rank_zero_only, "rank", 0):
        time.sleep(FIRST_TO_SPEAK_SECONDS)
    sys.stderr.write(f"aespa-pl: {' '.join(message.split())}\n")
    sys.exit(status)


def _print_perplexities(console: Console, results: Mapping[str, Mapping[str, float]]) -> None:
    if not results:
        return
    texts = next(iter(results.values()))
    table = Table(title="perplexity (lower is better)", title_justify="left")
    table.add_column("")
    for text in texts:
        table.add_column(text, justify="right")
    labels = {"original": "original", "nearest": "round-to-nearest", "quantized": "aespa"}
    for kind, values in results.items():
        table.add_row(labels[kind], *(f"{values[text]:.3f}" for text in texts))
    console.print(table)


def quiet_libraries() -> None:
    """Keep what Lightning says about every Trainer off the screen: a walk makes one a block."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric.utilities").setLevel(logging.WARNING)  # of their processes
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # eight lines of retries
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*exists and is not empty.*")  # a continued block
    warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
