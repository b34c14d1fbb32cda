"""Read the options of ``aespa-pl compare`` that choose the cells, and put mistakes in them into words."""

from dataclasses import dataclass, field, replace
from itertools import product
from typing import get_args, get_type_hints

from jsonargparse import ArgumentError, ArgumentParser

from aespa_pl.commands.arguments import Arguments, Option
from aespa_pl.commands.mistakes import expected, nearest
from aespa_pl.errors import UserError
from aespa_pl.methods import METHODS
from aespa_pl.report.comparison import Cell
from aespa_pl.settings import Bits, MethodName, Seed

SECTION = "compare"
DECIDED = {
    "ckpt_path": "each cell finds its own run",
    "quantization.method": "use --compare.methods",
    "quantization.bits": "use --compare.bits",
    "data.calibration.seed": "use --compare.seeds",
}
"""Keys of fit that differ from cell to cell, and what to do instead of giving them."""


@dataclass(frozen=True)
class CompareSettings:
    """Chooses the cells of the table."""

    methods: list[MethodName] = field(default_factory=lambda: list(METHODS))
    """Values of quantization.method; by default all of them."""
    bits: list[Bits] = field(default_factory=lambda: [2, 3, 4])
    """Values of quantization.bits."""
    seeds: list[Seed] = field(default_factory=lambda: [0])
    """Values of data.calibration.seed; mean and spread are over them."""

    def cells(self) -> list[Cell]:
        """Return all cells; the cells of one bit width follow each other."""
        every = product(self.bits, self.methods, self.seeds)
        return list(dict.fromkeys(Cell(method, bits, seed) for bits, method, seed in every))


ITEMS = {f"{SECTION}.{name}": get_args(kind)[0] for name, kind in get_type_hints(CompareSettings).items()}
"""Type of an item in the list of each key."""


def compare_parser() -> ArgumentParser:
    """Return the parser of the options that choose the cells; its help names fit's."""
    parser = ArgumentParser(
        prog="aespa-pl compare",
        description="Compare methods on one model, in one table. All keys of aespa-pl fit are taken as well "
        "(aespa-pl fit --help); each cell is a run of fit in output.folder/output.name, and finished cells "
        "aren't run again.",
        exit_on_error=False,
    )
    parser.add_argument("--config", help="Configuration of fit that every cell has in common.")
    parser.add_class_arguments(CompareSettings, SECTION)
    return parser


def split_options(given: Arguments) -> tuple[CompareSettings, Arguments]:
    """Return the settings of compare, and the options of fit. Raises UserError where one is refused."""
    own = [option for option in given.options if is_own(option)]
    rest = [option for option in given.options if not is_own(option)]
    for option in own:
        if option.key.removesuffix("+") not in ITEMS:
            raise UserError(f"{option.key} is unknown{nearest(option.key, list(ITEMS))}")
    for option in rest:
        if option.key in DECIDED:
            raise UserError(f"{option.key} differs from cell to cell: {DECIDED[option.key]}")
    parser = compare_parser()
    try:
        parsed = parser.parse_args([word for option in own for word in option.words])
    except ArgumentError as error:
        mistakes = [words for option in own if (words := _mistake(parser, option))]
        raise UserError("; ".join(mistakes) or " ".join(str(error).split())) from error
    settings: CompareSettings = parser.instantiate(parsed)[SECTION]
    for key in ITEMS:
        if not getattr(settings, key.removeprefix(f"{SECTION}.")):
            raise UserError(f"{key} is empty: name at least one")
    return settings, replace(given, options=tuple(rest))


def is_own(option: Option) -> bool:
    """Return whether an option is of this command, not of fit."""
    return option.key.startswith(f"{SECTION}.")


def _mistake(parser: ArgumentParser, option: Option) -> str:
    """Return what is wrong with a value; the empty text where nothing is."""
    try:
        parser.parse_args(option.words)
    except ArgumentError:
        key = option.key.removesuffix("+")
        default = getattr(CompareSettings(), key.removeprefix(f"{SECTION}."))
        shown = "has no value" if option.value is None else f"is {option.value}"
        example = ", ".join(map(str, default[:2]))
        return f"{key} {shown}: give a list such as '[{example}]', of items that are {expected(ITEMS[key])}"
    return ""
