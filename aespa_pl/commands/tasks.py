"""Run ``aespa-pl test --tasks``: measure accuracies of the original, nearest and quantized model."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aespa_pl.commands.job import Job
from aespa_pl.evaluation.tasks import Tasks, measure_tasks
from aespa_pl.settings import TaskSettings


def compare_tasks(
    job: Job, model: Path, tasks: Tasks, settings: TaskSettings, kinds: Sequence[str]
) -> dict[str, Any]:
    """Return ``tasks`` (scores by kind and task) and ``test_seconds`` by kind, for ``test.json``.

    Raises UserError where the model does not fit into the memory that is free.
    """
    scores, seconds = {}, {}
    for kind in kinds:
        start = time.perf_counter()
        found = measure_tasks(
            model if kind == "quantized" else job.pretrained.folder,
            tasks,
            settings,
            device=job.device,
            dtype=job.dtype,
            change=job.round_to_nearest if kind == "nearest" else None,
        )
        scores[kind] = {name: asdict(score) for name, score in found.items()}
        seconds[kind] = time.perf_counter() - start
    return {"tasks": scores, "test_seconds": seconds}
