"""Run ``aespa-pl fit`` and ``aespa-pl test``, the commands that work through Lightning's Trainer."""

import inspect
import logging
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

import torch
from jsonargparse import ArgumentError
from lightning.pytorch import Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger
from rich.console import Console

from aespa_pl.commands import evaluate, fit
from aespa_pl.commands.arguments import KEYS, Arguments
from aespa_pl.commands.board import Board
from aespa_pl.commands.ending import ENDINGS, EndedError
from aespa_pl.commands.exported import measure_exported, quantized_folder
from aespa_pl.commands.job import Job
from aespa_pl.commands.output import PipeConsole, print_results, quiet_libraries, quiet_writers
from aespa_pl.commands.resuming import note_own
from aespa_pl.commands.sections import add_sections, instantiated
from aespa_pl.commands.trainer_section import (
    TRAINER_KEYS,
    configuration_text,
    refuse_trainer_keys,
    value_refused,
)
from aespa_pl.commands.trainers import (
    BlockTrainers,
    check_trainer,
    check_tuning,
    first_trainer,
)
from aespa_pl.distributed.launch import (
    end_with_launcher,
    launch,
    let_the_first_speak,
)
from aespa_pl.distributed.processes import PeerLostError, World
from aespa_pl.errors import UserError
from aespa_pl.planning.division import Devices
from aespa_pl.progress import WalkProgress
from aespa_pl.run.find import LAST
from aespa_pl.run.folder import how_to_continue
from aespa_pl.run.interruption import Interruption
from aespa_pl.run.journal import Run
from aespa_pl.settings import TaskSettings
from aespa_pl.storage.files import write_text

PEER_LOST = 1
"""Status of a process whose peers have ended; if a mistake was made, another process reports it."""


class BlockTrainer(Trainer):
    """Each block, and each tuning, has a Trainer of Lightning's with these keys."""

    def fit(self, *args: Any, **kwargs: Any) -> None:
        """Quantize a model block by block."""
        super().fit(*args, **kwargs)

    def test(self, *args: Any, **kwargs: Any) -> Any:
        """Measure the perplexity of the original and of the quantized model."""
        return super().test(*args, **kwargs)


class AespaCLI(LightningCLI):
    """Parses the sections model, data, quantization, output and trainer, and runs the command."""

    def __init__(self, command: str, interruption: Interruption, **kwargs: Any) -> None:
        """Parse the arguments and run the command.

        Args:
            command: fit or test; only test takes tasks.
            interruption: Tells when the user or the system wants us to stop.
            kwargs: Arguments of LightningCLI.
        """
        self.command = command
        self.interruption = interruption
        super().__init__(**kwargs)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # Lightning's has no self
        """Return the command with the arguments of the Trainer's method, none of which is offered.

        The other command is left out, because it takes 0.2 s to make its parser.
        """
        parameters = inspect.signature(getattr(Trainer, self.command)).parameters
        return {self.command: set(parameters) - {"self"}}

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the arguments that were passed, whatever ``sys.argv`` is."""
        self.config = parser.parse_args(args)  # type: ignore[arg-type]  # a list: see run

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the seed for random numbers in callbacks of the user; our own code draws none from it."""
        parser.add_argument(
            "--seed_everything",
            type=KEYS["seed_everything"],
            default=self.seed_everything_default,
            help="Seed for callbacks and loggers that use random numbers; true: a random one.",
        )

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the settings and the Trainer, without the keys that the walk decides."""
        add_sections(parser, self.trainer_class)

    def instantiate_classes(self) -> None:
        """Make the settings, and one Trainer that knows the device; each block gets its own later."""
        self.config_init = instantiated(self.parser, self.config)
        self.settings = self.config_init[self.subcommand]
        check_trainer({**TRAINER_KEYS, **self.settings.trainer})
        self.model = self.datamodule = None
        self.trainer = first_trainer(self.instantiate_trainer, self.settings.trainer)

    def fit(self, **_: Any) -> None:
        """Quantize, and print the results."""
        job = self._job()  # before other processes: most mistakes are noticed here
        self.saved = configuration_text(self.parser, self.config, "fit", job.quantization)
        check_tuning(self.trainer, self.settings.trainer, job.quantization.tuning, job.work)
        world, console = self._launch()
        board = Board(self.settings.trainer.logger, self.saved)
        with WalkProgress(console) as progress:
            run, metrics = fit.fit(
                job,
                self.settings.ckpt_path,
                trainers=self._block_trainers(board, progress, world),
                progress=progress,
                devices=Devices(self.trainer.world_size, self.trainer.num_nodes),
                world=world,
            )
        board.show_result(asdict(job.quantization), metrics)
        print_results(console, metrics, evaluate.method_of(run))
        console.print(
            f"{metrics['seconds']['quantization']:.0f} s for the quantization", highlight=False
        )
        console.print(f"quantized model: {run.model_folder}", highlight=False, soft_wrap=True)
        console.print(str(run.folder), highlight=False, soft_wrap=True)

    def test(self, **_: Any) -> None:
        """Measure, and print the results."""
        tasks = TaskSettings(**{key.name: self.settings[key.name] for key in fields(TaskSettings)})
        if (exported := quantized_folder(self.settings.model)) is not None:
            s, device = self.settings, self.trainer.strategy.root_device
            metrics = measure_exported(exported, s.model, s.data, tasks, device)
            print_results(PipeConsole(), metrics, exported.name)
            return
        job = self._job()
        world, console = self._launch()
        which = self.settings.ckpt_path or LAST
        with WalkProgress(console) as progress:
            run, metrics = evaluate.test(job, which, tasks, progress, world)
        print_results(console, metrics, evaluate.method_of(run))
        console.print(str(run.folder), highlight=False, soft_wrap=True)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the run to go on with, and the tasks of test."""
        if self.command == "test":
            parser.add_class_arguments(TaskSettings)
        parser.add_argument(
            "--ckpt_path",
            type=str | None,
            default=None,
            help="last (the run of output.folder/output.name that was worked on last), or the folder of a "
            "run or a file in it. fit: continue this run; without it, a new one starts. test: measure this "
            "run; without it, the last. Without --config and --model.pretrained, the run's own config.yaml "
            "is taken; --trust_run true lets that of a run from somebody else name callbacks, loggers and "
            "data.cache.",
        )

    def _job(self) -> Job:
        s = self.settings
        return Job.prepare(
            s.model, s.data, s.quantization, s.output, self.trainer.strategy.root_device
        )

    def _launch(self) -> tuple[World, Console]:
        """Start the other processes; return all of them, and where this one writes."""
        world = launch(self.trainer)
        if not world.is_first:
            logging.getLogger("aespa_pl").setLevel(logging.ERROR)  # the first has the same warnings
        return world, PipeConsole(quiet=not world.is_first)

    def _block_trainers(self, board: Board, progress: WalkProgress, world: World) -> BlockTrainers:
        def begin(run: Run) -> list[Logger]:
            write_text(run.folder / "config.yaml", self.saved)
            note_own(run.folder)
            self.interruption.how_to_continue = how_to_continue(run.folder)
            return board.open(run)

        return BlockTrainers(
            begin=begin,
            # made again for each block: loggers and callbacks keep a state
            section=lambda: self.parser.instantiate(self.config)[self.subcommand].trainer,
            instantiate=self.instantiate_trainer,
            first=self.trainer,
            output=self.settings.output,
            iterations=self.settings.quantization.rounding.iterations,
            interruption=self.interruption,
            progress=progress,
            world=world,
        )


def run(words: Sequence[str], interruption: Interruption) -> None:
    """Run ``fit`` or ``test``.

    Args:
        words: The command and its options, already checked by :mod:`aespa_pl.commands.arguments`.
        interruption: Tells when the user or the system wants us to stop.

    Raises:
        UserError: Something that the user gave can't work.
        EndedError: Another process of the run has ended.
    """
    quiet_libraries()
    quiet_writers()
    end_with_launcher()
    torch.set_float32_matmul_precision("highest")  # whatever the environment says
    arguments = Arguments.read(words[1:])
    refuse_trainer_keys(arguments)
    # argparse's own usage would list all keys before it explains them
    usage = f"aespa-pl {words[0]} [--config FILE] [--KEY VALUE ...]"
    try:
        AespaCLI(
            words[0],
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
                words[0]: {"exit_on_error": False, "usage": usage},
            },
            args=list(words),
        )
    except ArgumentError as error:
        raise UserError(value_refused(error, arguments, words[0])) from error
    except PeerLostError as error:
        let_the_first_speak()
        raise EndedError(
            f"another process of this run has ended or cannot be reached: {error}", PEER_LOST
        ) from error
    except ENDINGS:
        let_the_first_speak()
        raise
