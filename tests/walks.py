"""Walk over tiny models, for the tests of the walk, of runs and of resuming."""

import gc
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from rich.console import Console
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma4TextConfig, PreTrainedModel, PreTrainedTokenizerFast

from aespa_pl.measure import Stopwatch
from aespa_pl.models import family_of
from aespa_pl.models.family import BlockLayout, FoldIntoRows, InputGroup, Projection
from aespa_pl.models.pretrained import PretrainedFolder
from aespa_pl.models.streamed import StreamedModel
from aespa_pl.planning.partition import WHOLE, Partition
from aespa_pl.progress import WalkProgress
from aespa_pl.resolve import resolved
from aespa_pl.run.context import Context
from aespa_pl.run.folder import Training
from aespa_pl.run.journal import Run
from aespa_pl.settings import GridSettings, PolishSettings, QuantizationSettings, RoundingSettings
from aespa_pl.walk.walk import Walk
from tests.models.examples import LENGTH, VOCABULARY, make_ids, make_model, random_model, save
from tests.models.parts import GEMMA4, GEMMA4_SHORT, GEMMA4_SMALL, LLAMA, PLAIN, config
from tests.tuning.tuned import silent_trainer

SEGMENTS, BLOCKS = 6, 2
CPU = torch.device("cpu")
BASE = QuantizationSettings(
    method="aespa",
    damping=0.01,
    grid=GridSettings(max_rounds=2),
    rounding=RoundingSettings(iterations=24, learning_rate=0.12),
    polish=PolishSettings(enabled=False),
    input_correction=0,
)
"""Settings with the paper's parts alone; so few iterations want larger steps, to leave OPTQ's rounding."""


TrainerOptions = Callable[[Run, Training], Mapping[str, Any]]
"""Arguments of a Trainer, beside those of ``SilentTrainers``."""


def changed(changes: Mapping[str, Any], settings: Any = BASE) -> Any:
    """Return ``settings`` with ``{"rounding.iterations": 3}`` and the like in it."""
    for key, value in changes.items():
        name, _, rest = key.partition(".")
        inner = changed({rest: value}, getattr(settings, name)) if rest else value
        settings = replace(settings, **{name: inner})
    return settings


@dataclass(frozen=True)
class SilentTrainers:
    """Makes Trainers without loggers, checkpoints and bars."""

    iterations: int
    rounding_options: TrainerOptions
    tuning_options: TrainerOptions

    def begin(self, run: Run) -> Sequence[Logger]:
        return []

    def loggers(self, run: Run, curves: str) -> Sequence[Logger]:
        return []

    def free(self) -> None:
        gc.collect()

    def of_rounding(self, run: Run, training: Training) -> Trainer:
        silent = {
            "accelerator": "cpu",
            "max_steps": self.iterations,
            "max_epochs": -1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "log_every_n_steps": 12,
        }
        return Trainer(**{**silent, **self.rounding_options(run, training)})

    def of_tuning(self, run: Run, training: Training, epochs: int) -> Trainer:
        options = {"log_every_n_steps": 1, **self.tuning_options(run, training)}
        return silent_trainer(epochs, **options)


@dataclass(frozen=True)
class Quantized:
    """Holds the input of a walk, and the files that it left."""

    original: PreTrainedModel
    ids: Tensor
    run: Run
    layout: BlockLayout
    said: str

    @property
    def blocks_path(self) -> str:
        return family_of(self.original.config).blocks_path

    @property
    def journal(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.run.journal_file.read_text())
        return content

    def losses(self, index: int) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = self.journal["blocks"][str(index)]["losses"]
        return found

    def file(self, index: int) -> dict[str, Tensor]:
        """Return the tensors of blocks/block_NNN.safetensors."""
        return load_file(self.run.folder / "blocks" / f"block_{index:03}.safetensors")

    def exported(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """Return the model folder as the library loads it."""
        model = AutoModelForCausalLM.from_pretrained(self.run.model_folder, dtype=dtype)
        return model.eval().requires_grad_(requires_grad=False)

    def group(self, projection: Projection) -> InputGroup:
        return next(group for group in self.layout.groups if projection in group.projections)

    def row_factor(self, index: int, projection: Projection) -> Tensor:
        """Return the zeta ``[rows, 1]`` that is folded into the rows of a projection."""
        for group in self.layout.groups:
            if group.fold == FoldIntoRows(projection.name):
                return self.file(index)[f"{group.name}.zeta"][:, None]
        return torch.ones(1, 1)

    def zeta(self, index: int, projection: Projection) -> Tensor:
        """Return the zeta ``[columns]`` of a projection's columns."""
        return self.file(index).get(f"{self.group(projection).name}.zeta", torch.ones(1))


def walk(
    name: str,
    folder: Path,
    changes: Mapping[str, Any] | None = None,
    *,
    model: PreTrainedModel | None = None,
    ids: Tensor | None = None,
    options: TrainerOptions = lambda _run, _portion: {},
    run: Run | None = None,
    hidden_folder: Path | None = None,
    partition: Partition = WHOLE,
    recompute: bool = False,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    stopwatch: Stopwatch | None = None,
    tuning_options: TrainerOptions = lambda _run, _portion: {},
) -> Quantized:
    """Quantize an example; the same name gives the same weights and the same text.

    Args:
        name: Of the example.
        folder: For the model and the runs.
        changes: Of the settings.
        model: A model that replaces the example's.
        ids: Calibration text instead of random words.
        options: Of each block's Trainer.
        run: One to go on with.
        hidden_folder: For hidden states on disk.
        partition: What of a block is worked on at once.
        recompute: Blocks run twice in the end-to-end tuning.
        device: Where blocks run; the Trainers' options have to say the same.
        dtype: Type that blocks run in.
        stopwatch: One that tells more than seconds.
        tuning_options: Of each tuning's Trainer.
    """
    torch.manual_seed(0)
    model = make_short(name) if model is None else model
    ids = make_ids(SEGMENTS) if ids is None else ids
    settings = resolved(changed(changes or {}))
    pretrained = PretrainedFolder.open(save(model, folder / "original"))
    source = StreamedModel.open(pretrained, device, dtype, hidden_folder=hidden_folder)
    run = run or Run.create(folder / "runs", {})
    said = io.StringIO()
    context = Context(
        source=source,
        run=run,
        settings=settings,
        trainers=SilentTrainers(settings.rounding.iterations, options, tuning_options),
        batch_size=4,
        progress=WalkProgress(Console(file=said, width=200)),
        stopwatch=stopwatch or Stopwatch(),
        partition=partition,
        recompute=recompute,
    )
    Walk(context).quantize(ids)
    return Quantized(model, ids, run, context.layout(0), said.getvalue())


def same_files(one: Quantized, other: Quantized) -> None:
    """Check that two walks have left the same tensors of their blocks."""
    for index in range(BLOCKS):
        a, b = one.file(index), other.file(index)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


def shortened(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model with its first ``BLOCKS`` blocks: a second block sees quantized ones before."""
    del model.get_submodule(family_of(model.config).blocks_path)[BLOCKS:]
    model.config.num_hidden_layers = BLOCKS
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:BLOCKS]
    content = model.config.to_dict()
    if of_blocks := content.get("per_layer_config"):  # of Gemma 4
        content["per_layer_config"] = {i: own for i, own in of_blocks.items() if int(i) < BLOCKS}
        model.config = type(model.config)(**content)
    return model


def make_short(name: str) -> PreTrainedModel:
    """Return a random model of a kind with ``BLOCKS`` blocks."""
    if name == "gemma4-small":  # whose last block borrows keys from one before
        parts = (LLAMA, PLAIN, GEMMA4, GEMMA4_SMALL, GEMMA4_SHORT)
        return random_model(config(Gemma4TextConfig, *parts), torch.float32)
    return shortened(make_model(name, torch.float32))


def save_short(name: str, folder: Path) -> Path:
    """Write a random model of a kind with ``BLOCKS`` blocks, the same one each time, and its text."""
    torch.manual_seed(0)
    return save_with_words(make_short(name), folder)


def save_with_words(model: PreTrainedModel, folder: Path) -> Path:
    """Write a model whose tokenizer takes w3 for 3; ``words.txt`` beside it is text for it."""
    save(model, folder)
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    ids = torch.randint(1, VOCABULARY, (4 * SEGMENTS * LENGTH,)).tolist()
    (folder.parent / "words.txt").write_text(" ".join(f"w{i}" for i in ids))
    return folder
