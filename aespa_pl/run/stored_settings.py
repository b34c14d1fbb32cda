"""Read the settings that a run was made with."""

from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from aespa_pl.errors import UserError, one_line, system_words
from aespa_pl.run.journal import Run
from aespa_pl.settings import QuantizationSettings, Settings

T = TypeVar("T")


def stored_settings(folder: Path, fingerprint: Mapping[str, Any]) -> Settings:
    """Return the settings of the run in a folder; what its fingerprint has counts before config.yaml.

    That is all of the quantization but the number of iterations, with which a run may be continued. Keys that
    this version does not know are left out. Raises UserError where a value is none that is allowed.
    """
    path = folder / "config.yaml"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise TypeError("it has no sections")
        section = _section(fingerprint, "quantization") or content["quantization"]
        rounding = _section(_section(content, "quantization"), "rounding")
        content["quantization"] = {**section, "rounding": {**rounding, **_section(section, "rounding")}}
        return _typed(Settings, content)
    except (
        OSError, ValueError, KeyError, TypeError, RecursionError, ArgumentError, yaml.YAMLError
    ) as error:  # fmt: skip
        words = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        words = system_words(error) if isinstance(error, OSError) else one_line(words)
        raise UserError(
            f"{path} cannot be read ({words}): restore it, or copy the configuration that the run was begun "
            "with into its place"
        ) from error


def can_read_settings(run: Run) -> bool:
    """Return whether the settings of a run can be read."""
    try:
        stored_settings(run.folder, run.fingerprint)
    except UserError:
        return False
    return True


def stored_quantization(run: Run) -> QuantizationSettings:
    """Return the section ``quantization`` as the journal has it, without the number of iterations."""
    try:
        return _typed(QuantizationSettings, _section(run.fingerprint, "quantization"))
    except (ValueError, TypeError, ArgumentError) as error:
        raise UserError(f"{run.journal_file} is damaged ({error}): start a new run") from error


def _section(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a section of settings; an empty one where there is none."""
    section = content.get(key, {})
    return section if isinstance(section, Mapping) else {}


def _typed(kind: type[T], content: Any) -> T:
    """Return a dataclass of settings; values that no setting may have are refused."""
    parser = _parser(cast(Any, kind))
    found: T = parser.instantiate(parser.parse_object({"s": _known(kind, content)})).s
    return found


@cache
def _parser(kind: type) -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, "s")
    return parser


def _known(kind: Any, content: Any) -> Any:
    """Return the values that a dataclass of settings has fields for."""
    if not (is_dataclass(kind) and isinstance(content, Mapping)):
        return content
    hints = get_type_hints(kind)
    return {name: _known(hints[name], content[name]) for name in hints if name in content}
