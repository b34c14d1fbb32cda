"""Read what a run has stored; whatever is missing or damaged becomes a note on the page."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from aespa_pl.curve_names import RECONSTRUCTION
from aespa_pl.errors import UserError
from aespa_pl.evaluation.later import with_later
from aespa_pl.evaluation.size import bits_per_weight, projection_weights
from aespa_pl.report.curves import Curves, read_curves
from aespa_pl.run.folder import how_to_continue
from aespa_pl.run.schema import DESCRIPTION, FORMAT
from aespa_pl.settings.quantization import bits_of_projection

Losses = dict[tuple[int, str], dict[str, float]]


@dataclass(frozen=True)
class GridTensors:
    """Holds the numbers beside the integers, of one projection or one input group of one block."""

    scale: NDArray[np.float64] | None = None
    zero_point: NDArray[np.float64] | None = None
    zeta: NDArray[np.float64] | None = None


@dataclass(frozen=True)
class StoredRun:
    """Holds what the folder of a run says."""

    folder: Path
    settings: Mapping[str, Any]
    """Settings of ``config.yaml``, their keys joined by dots; empty where there is none."""
    blocks: Mapping[int, Mapping[str, Any]]
    """The journal's record of each finished block."""
    curves: Curves
    grids: Mapping[tuple[int, str], GridTensors]
    """Scales, zero points and zeta, by block and by projection or input group."""
    metrics: Mapping[str, Any]
    """``metrics.json``, with the measurements of a later ``aespa-pl test``, which ``test.json`` has."""
    versions: Mapping[str, str]
    tuned: Mapping[str, Any] = field(default_factory=dict)
    """The journal's record of the end-to-end tuning; empty where there was none."""
    shape: Mapping[str, float] = field(default_factory=dict)
    """``weights`` (number) and ``bits_per_weight``, of the projections of the finished blocks."""
    notes: tuple[str, ...] = ()
    """Sentences about what is missing or damaged, and what to do about it."""

    @property
    def name(self) -> str:
        """Return name and version, ``opt125m_w2/version_0``."""
        return f"{self.folder.parent.name}/{self.folder.name}"

    @property
    def losses(self) -> Losses:
        """Return the losses in the journal (nearest, optq, final ...), by block and projection."""
        return {
            (index, projection): values
            for index, record in self.blocks.items()
            for projection, values in record.get("losses", {}).items()
        }

    @property
    def projections(self) -> list[str]:
        """Return the names of the projections, in the order of the block."""
        names = [projection for _, projection in self.losses]
        names += [projection for _, projection in self.curves.of(RECONSTRUCTION)]
        return list(dict.fromkeys(names))

    @property
    def command(self) -> str:
        """Return the command that makes the run again."""
        return f"aespa-pl fit --config {shlex.quote(str(self.folder / 'config.yaml'))}"


def read_run(folder: Path) -> StoredRun:
    """Read all that a run has stored.

    Raises:
        UserError: The journal is damaged, or a newer version of aespa-pl wrote it. Anything else that
            is missing or damaged becomes a note.
    """
    journal, notes = _journal(folder), []
    if journal["format"] < FORMAT:
        notes.append(
            f"An older version of aespa-pl wrote this run (journal format {journal['format']}, today's is "
            f"{FORMAT}). The page shows what it stored; quantize again for the rest."
        )
    blocks = {
        int(index): record for index, record in sorted(journal["blocks"].items(), key=_by_index)
    }
    if not blocks:
        notes.append("No block is finished yet. Make the report again when one is.")
    notes += _progress(folder, len(blocks))
    settings = _settings(folder, notes)
    metrics = _json(folder / "metrics.json", notes, "measure again with aespa-pl test")
    later = _json(folder / "test.json", notes, "remove it, and measure again with aespa-pl test")
    curves = read_curves(folder)
    notes += [
        f"The event files in {path.name} cannot be read, so its curves are missing."
        for path in curves.unreadable
    ]
    grids, shape = _grids(folder, blocks, settings, notes)
    made = _json(folder / "model" / DESCRIPTION, notes, "remove it; it is not needed to load")
    return StoredRun(
        folder=folder,
        settings=settings,
        blocks=blocks,
        curves=curves,
        grids=grids,
        metrics=with_later(metrics, later),
        versions=made.get("versions", {}),
        tuned=journal.get("tuned") or {},
        shape=shape,
        notes=tuple(notes),
    )


def _by_index(item: tuple[str, Any]) -> int:
    return int(item[0])


def _journal(folder: Path) -> dict[str, Any]:
    path = folder / "journal.json"
    try:
        journal: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not all(isinstance(record, dict) for record in journal["blocks"].values()):
            raise TypeError("a block's record is no mapping")
        newer = int(journal["format"]) > FORMAT
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is damaged ({error}): there is nothing to report; start a new run"
        ) from error
    if newer:
        raise UserError(f"{path} was written by a newer version of aespa-pl: update aespa-pl")
    return journal


def _progress(folder: Path, finished: int) -> list[str]:
    """Return what there is to say about a run that is not finished."""
    if (folder / "metrics.json").is_file():
        return []
    try:
        config = json.loads((folder / "model" / "config.json").read_text(encoding="utf-8"))
        of = f" of {config['num_hidden_layers']}"
    except (OSError, ValueError, KeyError, TypeError):
        of = ""
    return [
        f"This run has no metrics.json: it is still going, or it was stopped. {finished}{of} blocks are "
        f"finished. Continue it with: {how_to_continue(folder)}"
    ]


def _json(path: Path, notes: list[str], advice: str) -> dict[str, Any]:
    """Return a JSON file's mapping; nothing where there is no file, and a note where it is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be read ({error}): {advice}.")
        return {}
    if not isinstance(content, dict):
        notes.append(f"{path.name} is damaged, it holds no mapping: {advice}.")
        return {}
    return content


def _settings(folder: Path, notes: list[str]) -> dict[str, Any]:
    try:
        content = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        notes.append(
            f"config.yaml cannot be read ({type(error).__name__}), so no settings are shown."
        )
        return {}
    return flat(content) if isinstance(content, dict) else {}


def flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings with their keys joined by dots."""
    found: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _grids(
    folder: Path,
    blocks: Mapping[int, Any],
    settings: Mapping[str, Any],
    notes: list[str],
) -> tuple[dict[tuple[int, str], GridTensors], dict[str, float]]:
    """Return scales, zero points and zeta of the finished blocks, and how many bits a weight takes.

    The integers themselves are not read: a large model has billions.
    """
    grids: dict[tuple[int, str], dict[str, NDArray[np.float64]]] = {}
    shapes: dict[str, list[int]] = {}
    for index in blocks:
        path = folder / "blocks" / f"block_{index:03}.safetensors"
        try:
            with safe_open(path, "np") as file:
                for key in file.keys():  # noqa: SIM118  (not a mapping)
                    name, _, what = key.rpartition(".")
                    shapes[f"{index}.{key}"] = file.get_slice(key).get_shape()
                    if what != "integers":
                        grids.setdefault((index, name), {})[what] = file.get_tensor(key).astype(
                            float
                        )
        except (OSError, SafetensorError) as error:
            notes.append(
                f"blocks/{path.name} cannot be read ({error}): its scales are not shown. "
                "aespa-pl fit with --ckpt_path makes the block again."
            )
    bits, weights = settings.get("quantization.bits"), projection_weights(shapes)
    shape: dict[str, float] = {"weights": weights} if weights else {}
    if weights and isinstance(bits, int):
        prefix = "quantization.bits_of."
        bits_of = {k.removeprefix(prefix): v for k, v in settings.items() if k.startswith(prefix)}
        of_projection = partial(bits_of_projection, bits, bits_of)
        shape["bits_per_weight"] = bits_per_weight(shapes, of_projection)
    known = GridTensors.__dataclass_fields__
    return {
        key: GridTensors(**{what: value for what, value in found.items() if what in known})
        for key, found in grids.items()
    }, shape
