"""Define every setting of ``aespa-pl``: meaning, unit, range, default and the default's source.

The docstring under a field is its ``--help`` text. Ranges are types, so that a bad value is refused
while the command line is parsed. Settings that a method decides may be null; then
:func:`aespa_pl.resolve.resolved` fills in the method's value.
"""

from dataclasses import dataclass, is_dataclass
from typing import Any, get_type_hints

from aespa_pl.settings.data import (
    CalibrationSettings,
    CompareSettings,
    DataSettings,
    EvaluationSettings,
    ModelSettings,
    OutputSettings,
    TaskSettings,
)
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
    "CompareSettings",
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
    "Settings",
    "TaskSettings",
    "TuningSettings",
    "keys_of",
]


@dataclass(frozen=True)
class Settings:
    """Holds our sections of a configuration."""

    model: ModelSettings
    data: DataSettings
    quantization: QuantizationSettings
    output: OutputSettings


SECTIONS: dict[str, type] = get_type_hints(Settings)
"""Our sections of a configuration; the section ``trainer`` is Lightning's."""


def keys_of(section: Any, prefix: str) -> dict[str, Any]:
    """Return the type of each key of a section, by its whole name: ``quantization.grid.zfold``."""
    keys: dict[str, Any] = {}
    for name, kind in get_type_hints(section).items():
        key = f"{prefix}.{name}"
        keys |= keys_of(kind, key) if is_dataclass(kind) else {key: kind}
    return keys
