"""Define every setting of ``aespa-pl``: meaning, unit, range, default and the default's source.

The docstring under a field is its ``--help`` text. Ranges are types, so that a bad value is refused
while the command line is parsed. Settings that a method decides may be null; then
:func:`aespa_pl.resolve.resolved` fills in the method's value.
"""

from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from aespa_pl.settings.data import (
    CalibrationSettings,
    DataSettings,
    EvaluationSettings,
    ModelSettings,
    TaskSettings,
)
from aespa_pl.settings.output import OutputSettings
from aespa_pl.settings.quantization import (
    GridSettings,
    ObjectiveSettings,
    OptqSettings,
    PolishSettings,
    QuantizationSettings,
    RoundingSettings,
)
from aespa_pl.settings.tuning import BlockTuningSettings, ModelTuningSettings, TuningSettings
from aespa_pl.settings.types import EXPECTED, Bits, MethodName, Seed

__all__ = [
    "EXPECTED",
    "SECTIONS",
    "Bits",
    "BlockTuningSettings",
    "CalibrationSettings",
    "DataSettings",
    "EvaluationSettings",
    "GridSettings",
    "MethodName",
    "ModelSettings",
    "ModelTuningSettings",
    "ObjectiveSettings",
    "OptqSettings",
    "OutputSettings",
    "PolishSettings",
    "QuantizationSettings",
    "RoundingSettings",
    "Seed",
    "TaskSettings",
    "TuningSettings",
    "keys_of",
]

SECTIONS: dict[str, type] = {
    "model": ModelSettings,
    "data": DataSettings,
    "quantization": QuantizationSettings,
    "output": OutputSettings,
}
"""Our sections of a configuration; the section ``trainer`` is Lightning's."""


def keys_of(section: Any, prefix: str) -> dict[str, Any]:
    """Return the type of each key of a section, by its whole name: ``quantization.grid.zfold``."""
    found: dict[str, Any] = {}
    types = get_type_hints(section)
    for each in fields(section):
        key, kind = f"{prefix}.{each.name}", types[each.name]
        found |= keys_of(kind, key) if is_dataclass(kind) else {key: kind}
    return found
