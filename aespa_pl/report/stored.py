"""Read what a run has stored; whatever is missing or damaged becomes a note on the page."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError, safe_open

from aespa_pl.errors import UserError
from aespa_pl.evaluation.later import with_later
from aespa_pl.evaluation.size import bits_per_weight, projection_weights
from aespa_pl.run.folder import how_to_continue
from aespa_pl.run.schema import DESCRIPTION, FORMAT
from aespa_pl.run.stored_settings import read_settings
from aespa_pl.settings import QuantizationSettings

RECORD = {"losses": 2, "seconds": 1, "output_error": 1, "peak_bytes": 1, "tuning": 1}
"""Fields that the report reads of a block's record, with the depth of their numbers."""
METRICS = {"perplexity": 2, "tasks": 3, "size": 2, "test_seconds": 1, "seconds": 1, "peak_bytes": 1}
"""Fields that the report reads of metrics.json and test.json, with the depth of their numbers."""
LARGEST = 1e100
"""Numbers beyond this are damage, as are negative ones: ratios of others are finite."""
NEEDED = {"tasks": "value", "size": "bytes"}
"""Number without which the numbers beside it say nothing."""


@dataclass(frozen=True)
class StoredRun:
    """Holds what the folder of a run says; all numbers are finite."""

    folder: Path
    settings: Mapping[str, Any]
    """Settings of ``config.yaml``, their keys joined by dots; empty where there is none."""
    blocks: Mapping[int, Mapping[str, Any]]
    """The journal's record of each finished block: what ``RECORD`` names, and is not damaged."""
    metrics: Mapping[str, Any]
    """``metrics.json``, with the measurements of a later ``aespa-pl test``, which ``test.json`` has."""
    versions: Mapping[str, str]
    tuned: Mapping[str, Any] = field(default_factory=dict)
    """The seconds of the end-to-end tuning, by phase, under ``seconds``."""
    shape: Mapping[str, float] = field(default_factory=dict)
    """``weights`` (number) and ``bits_per_weight``, of the projections of the finished blocks."""
    notes: tuple[str, ...] = ()
    """Sentences about what is missing or damaged, and what to do about it."""

    @property
    def name(self) -> str:
        """Return name and version, ``opt125m_w2/version_0``."""
        return f"{self.folder.parent.name}/{self.folder.name}"

    @property
    def losses(self) -> dict[tuple[int, str], dict[str, float]]:
        """Return the losses in the journal (nearest, optq, final ...), by block and projection."""
        return {
            (index, projection): values
            for index, record in self.blocks.items()
            for projection, values in record["losses"].items()
        }

    @property
    def projections(self) -> list[str]:
        """Return the names of the projections, in the order of the block."""
        return list(dict.fromkeys(projection for _, projection in self.losses))

    @property
    def command(self) -> str:
        """Return the command that makes the run again."""
        return f"aespa-pl fit --config {shlex.quote(str(self.folder / 'config.yaml'))}"


def read_run(folder: Path) -> StoredRun:
    """Read all that a run has stored; what is missing or damaged becomes a note.

    Raises UserError where the journal is damaged, or a newer version of aespa-pl wrote it.
    """
    journal, notes = _journal(folder), list[str]()
    if journal["format"] < FORMAT:
        notes.append(
            f"An older version of aespa-pl wrote this run (journal format {journal['format']}, today's is "
            f"{FORMAT}). The page shows what it stored; quantize again for the rest."
        )
    damaged = list[str]()
    blocks = _blocks(journal["blocks"], damaged)
    tuned = _record(journal.get("tuned") or {}, {"seconds": 1}, "tuned", damaged)
    if damaged:
        notes.append(f"journal.json is damaged, and this is left out: {_listed(damaged)}.")
    if not blocks:
        notes.append("No block is finished yet. Make the report again when one is.")
    notes += _progress(folder, len(blocks))
    settings, quantization = _settings(folder, journal.get("fingerprint"), notes)
    metrics = _metrics(folder / "metrics.json", notes)
    later = _metrics(folder / "test.json", notes)
    versions = _json(folder / "model" / DESCRIPTION, notes).get("versions")
    return StoredRun(
        folder=folder,
        settings=settings,
        blocks=blocks,
        metrics=with_later(metrics, later),
        versions=versions if isinstance(versions, Mapping) else {},
        tuned=tuned,
        shape=_shape(folder, blocks, quantization, notes),
        notes=tuple(notes),
    )


def _journal(folder: Path) -> dict[str, Any]:
    path = folder / "journal.json"
    try:
        journal: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        newer = int(journal["format"]) > FORMAT
        if not isinstance(journal["blocks"], dict):
            raise TypeError("blocks is no mapping")
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise UserError(
            f"{path} is damaged ({error}): there is nothing to report; start a new run"
        ) from error
    if newer:
        raise UserError(f"{path} was written by a newer version of aespa-pl: update aespa-pl")
    return journal


def _blocks(records: Mapping[str, Any], damaged: list[str]) -> dict[int, dict[str, Any]]:
    found = {}
    for key, record in records.items():
        if key.isascii() and key.isdecimal() and isinstance(record, Mapping):
            found[int(key)] = _record(record, RECORD, f"block {key}", damaged)
        else:
            damaged.append(f"block {key}")
    return dict(sorted(found.items()))


def _record(
    content: Any, depths: Mapping[str, int], where: str, damaged: list[str]
) -> dict[str, Any]:
    """Return the numbers of each known key; an empty mapping where there are none."""
    if not isinstance(content, Mapping):
        damaged.append(where)
        content = {}
    return {
        key: _numbers(content.get(key) or {}, depth, f"{where}: {key}", damaged)
        for key, depth in depths.items()
    }


def _numbers(content: Any, depth: int, where: str, damaged: list[str]) -> dict[str, Any]:
    """Return the numbers that lie ``depth`` mappings deep, and note what else is there.

    None stands for a number that was not finite, or that there is none of.
    """
    if not isinstance(content, Mapping):
        damaged.append(where)
        return {}
    found: dict[str, Any] = {}
    for key, value in content.items():
        place = f"{where}.{key}"
        if depth > 1:
            found[key] = _numbers(value, depth - 1, place, damaged)
        elif isinstance(value, int | float) and 0 <= value < LARGEST:
            found[key] = value
        elif value is not None and key != "metric":  # of a task: acc or acc_norm
            damaged.append(place)
    return found


def _metrics(path: Path, notes: list[str]) -> dict[str, Any]:
    """Return what is measured; sections without any number are left out."""
    damaged = list[str]()
    found = _record(_json(path, notes), METRICS, path.name, damaged)
    for kind, values in found["perplexity"].items():
        for text in [text for text, value in values.items() if value <= 0]:
            damaged.append(f"{path.name}: perplexity.{kind}.{text}")
            del values[text]
    for section, needed in NEEDED.items():
        leaves = found[section].values() if section == "tasks" else [found[section]]
        for leaf in leaves:
            for name in [name for name, numbers in leaf.items() if needed not in numbers]:
                damaged.append(f"{path.name}: {section}.{name}")
                del leaf[name]
    if damaged:
        notes.append(
            f"{path.name} is damaged, and this is left out: {_listed(damaged)}. Measure again with "
            "aespa-pl test."
        )
    return {key: value for key, value in found.items() if value}


def _listed(damaged: list[str], most: int = 3) -> str:
    unique = list(dict.fromkeys(damaged))
    more = f" and {len(unique) - most} more" if len(unique) > most else ""
    return ", ".join(unique[:most]) + more


def _progress(folder: Path, finished: int) -> list[str]:
    """Return what there is to say about a run that is not finished."""
    if (folder / "metrics.json").is_file():
        return []
    try:
        config = json.loads((folder / "model" / "config.json").read_text(encoding="utf-8"))
        of = f" of {config['num_hidden_layers']}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        of = ""
    return [
        f"This run has no metrics.json: it is still going, or it was stopped. {finished}{of} blocks are "
        f"finished. Continue it with: {how_to_continue(folder)}"
    ]


def _json(path: Path, notes: list[str]) -> dict[str, Any]:
    """Return a JSON file's mapping; nothing where there is no file, and a note where it is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise TypeError("it holds no mapping")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read ({error}).")
        return {}
    return content


def _settings(
    folder: Path, fingerprint: Any, notes: list[str]
) -> tuple[dict[str, Any], QuantizationSettings | None]:
    """Return all settings as they are shown, keys joined by dots, and those that bits are counted by."""
    try:
        content = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        shown = flat(content) if isinstance(content, dict) else {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        shown = {}
    try:
        known = fingerprint if isinstance(fingerprint, Mapping) else {}
        return shown, read_settings(folder, known).quantization
    except UserError as error:
        reason, lost = type(error.__cause__).__name__, "bits per weight" if shown else "settings"
        notes.append(f"config.yaml cannot be read ({reason}), so no {lost} are shown.")
        return shown, None


def flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings with their keys joined by dots."""
    found: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _shape(
    folder: Path,
    blocks: Mapping[int, Any],
    quantization: QuantizationSettings | None,
    notes: list[str],
) -> dict[str, float]:
    """Return how many weights the finished blocks have, and how many bits each takes.

    Only the headers of their files are read.
    """
    shapes: dict[str, list[int]] = {}
    for index in blocks:
        path = folder / "blocks" / f"block_{index:03}.safetensors"
        try:
            with safe_open(path, "np") as file:
                for key in file.keys():  # noqa: SIM118  (not a mapping)
                    shapes[f"{index}.{key}"] = file.get_slice(key).get_shape()
        except (OSError, SafetensorError) as error:
            notes.append(
                f"blocks/{path.name} cannot be read ({error}): its weights are not counted. "
                "aespa-pl fit with --ckpt_path makes the block again."
            )
    if not shapes:
        return {}
    weights = projection_weights(shapes)
    if quantization is None:
        return {"weights": weights}
    return {"weights": weights, "bits_per_weight": bits_per_weight(shapes, quantization.bits_for)}
