"""Read what a run has stored; whatever is missing or damaged becomes a note on the page."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from aespa_pl.evaluation.table import known, measured
from aespa_pl.run.folder import how_to_continue
from aespa_pl.run.journal import Run
from aespa_pl.run.schema import DESCRIPTION, ShownDescription, StoredMixture


@dataclass(frozen=True)
class StoredRun:
    """Holds what the folder of a run says; all numbers are finite."""

    journal: Run
    settings: Mapping[str, Any]
    """Settings of ``config.yaml``, their keys joined by dots; empty where there is none."""
    metrics: Mapping[str, Any]
    """``metrics.json``, with the measurements of a later ``aespa-pl test``, which ``test.json`` has."""
    versions: Mapping[str, str]
    mixture: StoredMixture | None
    """What was chosen for ``quantization.target``; None where there is none."""
    notes: tuple[str, ...]
    """Sentences about what is missing or damaged, and what to do about it."""
    parents: int = 1
    """Number of folders that the name has before the version."""

    @property
    def name(self) -> str:
        """Return name and version, ``opt125m_w2/version_0``."""
        return "/".join(self.journal.folder.absolute().parts[-1 - self.parents :])

    @property
    def losses(self) -> dict[tuple[int, str], dict[str, float]]:
        """Return the losses in the journal (nearest, optq, final ...), by block and projection."""
        return {
            (index, projection): values
            for index, record in sorted(self.journal.blocks.items())
            for projection, values in record.losses.items()
        }

    @property
    def command(self) -> str:
        """Return the command that makes the run again."""
        return f"aespa-pl fit --config {shlex.quote(str(self.journal.folder / 'config.yaml'))}"


def read_runs(folders: Sequence[Path]) -> list[StoredRun]:
    """Read several runs as :func:`read_run` does; equal names get the folders before them that differ."""
    runs = [read_run(folder) for folder in folders]
    for _ in range(max((len(folder.absolute().parts) for folder in folders), default=0)):
        names = [run.name for run in runs]
        runs = [replace(r, parents=r.parents + 1) if names.count(r.name) > 1 else r for r in runs]
    return runs


def read_run(folder: Path) -> StoredRun:
    """Read all that a run has stored; what is missing or damaged becomes a note.

    Raises UserError where the journal is damaged, or another version of aespa-pl wrote it.
    """
    run, notes = Run.open(folder), list[str]()
    if not run.blocks:
        notes.append("No block is finished yet. Make the report again when one is.")
    if not (folder / "metrics.json").is_file():
        notes.append(
            "This run has no metrics.json: it is still going, or it was stopped. "
            f"Blocks that are finished: {len(run.blocks)}. Continue it with: {how_to_continue(folder)}"
        )
    settings = _settings(folder, notes)
    metrics, of_metrics = measured(folder)
    description = known(ShownDescription, folder / "model" / DESCRIPTION, notes, "no versions are shown")
    return StoredRun(
        run,
        settings,
        metrics,
        versions={} if description is None else description.versions,
        mixture=known(StoredMixture, folder / "mixture.json", notes, "its map and curve are not shown"),
        notes=(*notes, *of_metrics),
    )


def _settings(folder: Path, notes: list[str]) -> dict[str, Any]:
    """Return all settings as they are shown, keys joined by dots."""
    try:
        content = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        notes.append(f"config.yaml cannot be read ({type(error).__name__}), so no settings are shown.")
        return {}
    return flat(content) if isinstance(content, dict) else {}


def flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings with their keys joined by dots."""
    settings: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            settings |= flat(value, f"{prefix}{key}.")
        else:
            settings[f"{prefix}{key}"] = value
    return settings
