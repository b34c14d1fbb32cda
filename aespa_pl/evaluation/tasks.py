"""Measure accuracies on zero-shot tasks, by the rules of lm-evaluation-harness (the extra ``eval``).

The harness, and models whose weights are packed, need the whole model in memory; perplexity does not.
"""

import difflib
import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from aespa_pl.errors import UserError, first_line
from aespa_pl.evaluation.perplexity import BlockChange, StemChange
from aespa_pl.extras import install_command
from aespa_pl.measure import free_bytes, human
from aespa_pl.models import family_of
from aespa_pl.models.headers import skeleton
from aespa_pl.models.multimodal import text_config, text_options
from aespa_pl.paths import expanded
from aespa_pl.settings import TaskSettings

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

METRICS = ("acc_norm", "acc", "exact_match")
"""The first that a task has is its accuracy; acc_norm divides an answer's log likelihood by its length."""


@dataclass(frozen=True)
class Tasks:
    """Holds tasks that the harness knows and whose data are there."""

    manager: "TaskManager"
    names: tuple[str, ...]


def find_tasks(settings: TaskSettings) -> Tasks:
    """Find the tasks and load their data, before hours of anything else.

    Raises UserError where the harness is not installed, a task is unknown or has no accuracy, its file can't
    be read, or its data can't be had.
    """
    try:
        from lm_eval.tasks import TaskManager  # noqa: PLC0415  (optional)
    except ModuleNotFoundError as error:
        raise UserError(
            f"--tasks needs lm-evaluation-harness, but {error.name} is not installed: "
            f"{install_command('eval')}"
        ) from error
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    given = {name: expanded(name) for name in settings.tasks if name.endswith(".yaml")}
    files = {name: path.parent.resolve() / path.name for name, path in given.items()}
    folders = sorted({str(path.parent) for path in files.values()})
    # reading the harness's own thousands of tasks takes seconds; it runs no function that a file names
    manager = TaskManager(include_path=folders, include_defaults=len(files) < len(settings.tasks))
    known = {entry.yaml_path: name for name, entry in manager.task_index.items()}
    if wrong := [name for name, path in files.items() if path not in known]:
        raise UserError(
            f"--tasks: {', '.join(wrong)} is no task file that lm-evaluation-harness can read (its "
            "docs/new_task_guide.md describes the format)"
        )
    names = tuple(known[files[name]] if name in files else name for name in settings.tasks)
    for name in names:
        _load(manager, name)
    return Tasks(manager, names)


def measure_tasks(
    folder: Path,
    tasks: Tasks,
    settings: TaskSettings,
    *,
    device: torch.device,
    dtype: torch.dtype,
    change: BlockChange | None = None,
    change_stem: StemChange | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the accuracy on each task of the model in a Hugging Face folder, which transformers loads.

    ``value`` is it, from 0 to 1, ``metric`` its name, ``error`` the standard error over ``items``, if known.
    ``change`` changes each block before (round-to-nearest, for example), and ``change_stem`` embedding and
    head. Raises UserError where the model does not fit into the memory that is free, or can't be loaded.
    """
    from lm_eval import simple_evaluate  # noqa: PLC0415
    from lm_eval.models.huggingface import HFLM  # noqa: PLC0415

    model = load_whole(folder, device, dtype)
    if change_stem is not None:
        change_stem(model)
    if change is not None:
        change_blocks(model, change)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    results = simple_evaluate(
        HFLM(pretrained=model, tokenizer=tokenizer, batch_size=settings.task_batch_size),
        tasks=list(tasks.names),
        task_manager=tasks.manager,
        num_fewshot=settings.task_examples,
        limit=settings.task_limit,
        log_samples=False,
        **{f"{kind}random_seed": settings.task_seed for kind in ("", "numpy_", "torch_", "fewshot_")},
    )
    scores = {}
    for asked in tasks.names:  # a tag has no mean: its tasks are reported
        known = asked in results["results"]
        for name in [asked] if known else tasks.manager.load([asked])["tasks"]:
            scores[name] = _score(name, results)
    return scores


def change_blocks(model: PreTrainedModel, change: BlockChange) -> None:
    """Change each block of a model that transformers has loaded; experts get projections of their own."""
    family = family_of(model.config)
    family.unfuse(model)
    for index, block in enumerate(cast(nn.Module, model.get_submodule(family.blocks_path)).children()):
        change(index, block)


def unpacked_config(folder: Path) -> PreTrainedConfig:
    """Return the configuration of a model without that of its packing: the shapes are the original's.

    Raises UserError where transformers can't read it.
    """
    with _reading(folder):
        config = text_config(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def refuse_too_large(folder: Path, device: torch.device, dtype: torch.dtype) -> None:
    """Raise UserError if a model does not fit into the memory that is free; nothing is loaded."""
    parameters = skeleton(unpacked_config(folder)).parameters()
    needed = sum(parameter.numel() for parameter in parameters) * dtype.itemsize
    free = free_bytes(device)
    if needed > free:
        raise UserError(
            f"{folder} takes {human(needed, 'B')} in {str(dtype).removeprefix('torch.')}, but "
            f"{human(free, 'B')} are free on {device}, and tasks and packed models need the whole model in "
            "memory: choose another device, --model.dtype float16, or leave --tasks out (the perplexity of "
            "a run needs one block at a time)"
        )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model. Raises UserError where transformers can't read it."""
    with _reading(folder):
        return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(folder, trust_remote_code=False))


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"model.pretrained: transformers cannot load {folder} ({first_line(error)}): install what it "
            "names, or test the run, or an export of it as compressed-tensors"
        ) from error
    except Exception as error:  # what transformers raises depends on the file and its format
        raise UserError(
            f"model.pretrained: transformers cannot load {folder} ({first_line(error)}): copy "
            "it again from its origin, or export the run again"
        ) from error


def load_whole(folder: Path, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model, all of it in memory. Raises UserError where it does not fit, or can't be loaded."""
    refuse_too_large(folder, device, dtype)
    with _reading(folder):
        options = text_options(folder)
        with _no_report() if options else nullcontext():
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, trust_remote_code=False, local_files_only=True, **options
            )
    return cast(PreTrainedModel, model.to(device).eval())


@contextmanager
def _no_report() -> Iterator[None]:
    """Keep the library from listing what a multimodal model has beside its text model."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _load(manager: "TaskManager", name: str) -> None:
    """Load a task and its data once; later loads take them from the disk."""
    if name not in manager.all_tasks:
        close = ", ".join(difflib.get_close_matches(name, manager.all_tasks))
        advice = f"did you mean {close}?" if close else "lm_eval ls tasks lists all names"
        raise UserError(f"--tasks: there is no task {name}; a local one is path/to/task.yaml; {advice}")
    try:
        loaded = manager.load([name])
    except Exception as error:  # of the hub, the data library, or a function in the task file
        raise UserError(
            f"--tasks: the data of {name} cannot be had ({' '.join(str(error).split())[:300]}): check the "
            "connection to the hub, or the paths in the task file"
        ) from error
    group = loaded["groups"].get(name)
    if group is not None:
        _accuracy(name, {means.metric for means in group.aggregate_metric_list or ()})
    else:
        for task, content in loaded["tasks"].items():
            _accuracy(task, content.aggregation())


def _score(name: str, results: Mapping[str, Any]) -> dict[str, Any]:
    scores = results["results"][name]  # by "metric,filter": answers may be cut out in several ways
    metric = _accuracy(name, {key.partition(",")[0] for key in scores})
    key = next(key for key in scores if key.partition(",")[0] == metric)
    _, _, answers = key.partition(",")
    error = scores.get(f"{metric}_stderr,{answers}")
    members = results.get("group_subtasks", {}).get(name) or [name]
    counts = results.get("n-samples", {})
    return {
        "metric": metric if answers in {"", "none"} else f"{metric}, {answers}",
        "value": float(scores[key]),
        "error": float(error) if isinstance(error, int | float) else None,
        "items": sum(int(counts[member]["effective"]) for member in members if member in counts),
    }


def _accuracy(name: str, metrics: Collection[str]) -> str:
    """Return the metric that is a task's accuracy. Raises UserError where the task has none."""
    for metric in METRICS:
        if metric in metrics:
            return metric
    raise UserError(
        f"--tasks: {name} has none of the metrics {', '.join(METRICS)}: leave it out, or name a task that "
        "reports one of them"
    )
