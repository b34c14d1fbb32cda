"""Define ranges as types, and their words in error messages."""

import math
from typing import TYPE_CHECKING, Any, Literal

from jsonargparse import set_parsing_settings
from jsonargparse.typing import (
    ClosedUnitInterval,
    NonNegativeInt,
    OpenUnitInterval,
    PositiveInt,
    restricted_number_type,
    restricted_string_type,
)

from aespa_pl.methods import METHODS

set_parsing_settings(docstring_parse_attribute_docstrings=True)

if TYPE_CHECKING:
    Bits = int
    ProjectionBits = int
    Damping = float | Literal["auto"]
    Seed = int
    FinitePositive = float
    FiniteNonNegative = float
    PenaltyExponent = float
    MethodName = str
    RunName = str
else:
    MethodName = Literal[tuple(METHODS)]
    RunName = restricted_string_type("RunName", r"^(?!/|\.?/*$|(.*/)?\.\.(/|$)).+$")
    Bits = restricted_number_type("Bits", int, [(">=", 2), ("<=", 8)])
    ProjectionBits = Bits | Literal[16]
    Damping = OpenUnitInterval | Literal["auto"]
    Seed = restricted_number_type("Seed", int, [(">=", 0), ("<", 2**32)])
    # jsonargparse's PositiveFloat and NonNegativeFloat allow infinity
    FinitePositive = restricted_number_type("FinitePositive", float, [(">", 0), ("<", math.inf)])
    FiniteNonNegative = restricted_number_type("FiniteNonNegative", float, [(">=", 0), ("<", math.inf)])
    PenaltyExponent = restricted_number_type("PenaltyExponent", float, [(">=", 2), ("<", math.inf)])

Proportions = dict[str, FinitePositive]

EXPECTED: dict[Any, str] = {  # in error messages: what a value of each type has to be
    Bits: "a whole number from 2 to 8",
    RunName: "a name, which becomes a folder in output.folder",
    ProjectionBits: "a whole number from 2 to 8, or 16 for a projection that stays as it is",
    Seed: "0 to 4294967295",
    PositiveInt: "a whole number, 1 or more",
    NonNegativeInt: "a whole number, 0 or more",
    FinitePositive: "a finite number above 0",
    FiniteNonNegative: "a finite number, 0 or more",
    PenaltyExponent: "a finite number, 2 or more",
    Damping: "auto or a number between 0 and 1, without either",
    OpenUnitInterval: "a number between 0 and 1, without either",
    ClosedUnitInterval: "a number from 0 to 1",
    Proportions: "a finite number above 0 for each text, such as {c4: 0.7, code.jsonl: 0.3}",
    bool: "true or false",
    str: "a text",
    type(None): "null",
}
