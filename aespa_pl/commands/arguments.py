"""Read the words of a command line, and refuse mistakes before any large library is imported.

``fit``, ``test`` and ``plan`` share one set of keys. Here their YAML files are found and read, and each
key and value of our own sections is checked; Lightning checks the section of its Trainer.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from types import NoneType
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from aespa_pl.errors import UserError
from aespa_pl.settings import EXPECTED, SECTIONS, Seed, TaskSettings, keys_of

KEYS: dict[str, Any] = {
    key: kind for name, section in SECTIONS.items() for key, kind in keys_of(section, name).items()
} | {"seed_everything": bool | Seed}
"""Type of each key that is checked here."""
TASK_KEYS: dict[str, Any] = get_type_hints(TaskSettings)
"""Types of the keys that only test takes."""
OTHERS = ("config", "ckpt_path")
FREE = "trainer"
"""The section that Lightning checks."""
FLAGS = re.compile(r"--(help|print_config|print_shtab)|-h|--.*\.help")
REQUIRED = "model.pretrained"


@dataclass(frozen=True)
class Option:
    """Holds one ``--key value``; the value is None where none follows."""

    key: str
    value: str | None

    @property
    def words(self) -> list[str]:
        """Return the option as it is typed."""
        return [f"--{self.key}"] if self.value is None else [f"--{self.key}={self.value}"]


@dataclass(frozen=True)
class Arguments:
    """Holds the options of a command in their order; the last one of a key wins."""

    options: tuple[Option, ...]
    wants_help: bool = False

    @classmethod
    def read(cls, words: Sequence[str]) -> Self:
        """Divide a command line into options.

        Raises:
            UserError: A word belongs to no option.
        """
        if any(word == "-h" or re.fullmatch(r"--(.*\.)?help", word) for word in words):
            return cls((), wants_help=True)
        options, rest = [], list(words)
        while rest:
            word = rest.pop(0)
            if not word.startswith("--"):
                raise UserError(
                    f"{word} stands alone: a key comes before each value, such as --config {word}"
                )
            key, equals, value = word.removeprefix("--").partition("=")
            takes_next = not equals and rest and not rest[0].startswith("--")
            if FLAGS.match(word):
                options.append(Option(key, value if equals else None))
            else:
                options.append(
                    Option(key, rest.pop(0) if takes_next else value if equals else None)
                )
        return cls(tuple(options))

    @property
    def words(self) -> list[str]:
        """Return the options as they are typed."""
        return [word for option in self.options for word in option.words]

    def last(self, key: str) -> str | None:
        """Return the value that was given to a key, None if there is none."""
        return next((o.value for o in reversed(self.options) if o.key == key), None)

    def with_configurations(self) -> Self:
        """Return the options with the path of each configuration.

        Raises:
            UserError: There is no such file.
        """
        found = (
            Option(o.key, str(find_configuration(o.value))) if o.key == "config" and o.value else o
            for o in self.options
        )
        return replace(self, options=tuple(found))

    def without(self, name: str) -> Self:
        """Return the options without a key, and without those of a section of that name."""
        kept = tuple(o for o in self.options if o.key.partition(".")[0] != name)
        return replace(self, options=kept)

    def after(self, *options: Option) -> Self:
        """Return these options with others before them, over which these win."""
        return replace(self, options=(*options, *self.options))

    def then(self, *options: Option) -> Self:
        """Return these options with others behind them, which win."""
        return replace(self, options=(*self.options, *options))


def find_configuration(name: str) -> Path:
    """Return the file of a configuration: one here, or one that comes with the package.

    Raises:
        UserError: There is neither; the message lists what comes with the package.
    """
    here = Path(name).expanduser()
    if here.exists():
        return here
    packaged = Path(str(files("aespa_pl"))) / "configs"
    for candidate in (packaged / name, packaged / f"{name}.yaml"):
        if candidate.is_file() and candidate.parent == packaged:
            return candidate
    known = ", ".join(sorted(path.name for path in packaged.glob("*.yaml")))
    raise UserError(
        f"config: there is no file {name} here, and none of that name comes with aespa-pl: give a "
        f"file, or one of {known}"
    )


def refuse_mistakes(arguments: Arguments, command: str) -> None:
    """Raise UserError with all mistakes in our own sections; does nothing where help is asked for.

    Args:
        arguments: Options with the paths of their configurations.
        command: ``fit``, ``test`` or ``plan``; only test takes tasks.

    Raises:
        UserError: A file can't be read, a key is unknown, or a value is out of range.
    """
    if arguments.wants_help:
        return
    kinds = KEYS | TASK_KEYS if command == "test" else KEYS
    parser = _parser()
    mistakes, seen, typed = list[str](), set[str](), list[tuple[str, Any]]()
    for option in arguments.options:
        key = option.key.removesuffix("+")
        if FLAGS.match(f"--{option.key}"):
            continue
        if option.value is None:
            mistakes.append(f"{key} has no value: give one after --{key}")
        elif key == "config":
            found = leaves(read_configuration(Path(option.value)))
            seen.update(inner for inner, _ in found)
            # tasks may name files that run Python, so they stand where the user sees them
            mistakes += _mistakes(parser, KEYS, found, f" ({option.value})")
        elif key in SECTIONS:
            seen.add(REQUIRED)  # a section as a whole, in JSON or in a file: the parser's to check
        else:
            seen.add(key)
            typed.append((key, option.value))
    mistakes += _mistakes(parser, kinds, typed, "")
    if REQUIRED not in seen:
        mistakes.append(
            f"{REQUIRED} is missing: give --{REQUIRED} FOLDER, or a configuration with --config"
        )
    if mistakes:
        raise UserError("; ".join(dict.fromkeys(mistakes)))


def read_configuration(path: Path) -> Mapping[str, Any]:
    """Read a YAML file of sections.

    Raises:
        UserError: It is no text, no YAML, or has no keys.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"config: {path} cannot be read: {error.strerror or error}") from error
    except RecursionError as error:
        raise UserError(f"config: {path} is nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: bytes that are no UTF-8
        raise UserError(f"config: {path} is no YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise UserError(f"config: {path} has no keys: expected sections such as model and data")
    return content


def leaves(content: Mapping[Any, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return the values of a nested mapping by whole key."""
    found: list[tuple[str, Any]] = []
    for name, value in content.items():
        key = f"{prefix}{name}"
        is_section = any(known.startswith(f"{key}.") for known in KEYS)
        if isinstance(value, Mapping) and (is_section or key not in KEYS):
            found += leaves(value, f"{key}.")
        else:
            found.append((key, value))
    return found


def nearest(name: str, known: Sequence[str]) -> str:
    """Return ``: did you mean X?`` for a misspelt name, the empty string where nothing is near."""
    same_end = [key for key in known if key.split(".")[-1] == name.rsplit(".", maxsplit=1)[-1]]
    found = same_end[:1] or get_close_matches(name, known, n=1)
    return f": did you mean {found[0]}?" if found else ""


def expected(kind: Any) -> str:
    """Return in words what a value of a type has to be: ``2 to 8, or null``."""
    if kind in EXPECTED:
        return EXPECTED[kind]
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if get_origin(kind) is list:
        return "a list"
    if get_origin(kind) is dict:
        return f"a number for each name, {expected(get_args(kind)[1])}, such as {{down_proj: 4}}"
    choices = sorted(get_args(kind), key=lambda choice: choice is NoneType)
    return ", or ".join(map(expected, choices))


def _mistakes(
    parser: ArgumentParser, kinds: Mapping[str, Any], given: Sequence[tuple[str, Any]], where: str
) -> list[str]:
    """Return a message for each key or value that is wrong; ``where`` names the file that they are from.

    All values are tried together first, because the parser takes as long for one of them.
    """
    right = _takes(parser, [(key, value) for key, value in given if key in kinds], where)
    found = []
    for key, value in given:
        if key not in kinds:
            found += _unknown(kinds, key, where)
        elif not right and not _takes(parser, [(key, value)], where):
            shown = "null" if value is None else value
            found.append(f"{key} is {shown}: expected {expected(kinds[key])}{where}")
    return found


def _unknown(kinds: Mapping[str, Any], key: str, where: str) -> list[str]:
    """Return what is wrong with a key that is not of our own sections, none or one message."""
    if key.split(".", maxsplit=1)[0] == FREE or key in OTHERS:
        return []
    if key in TASK_KEYS:
        return [f"{key} is a key of aespa-pl test alone, on its command line{where}"]
    hint = nearest(key, [*kinds, *OTHERS, *SECTIONS, FREE])
    return [f"{key} is unknown{where}{hint or ': aespa-pl fit --help lists all keys'}"]


def _takes(parser: ArgumentParser, values: Sequence[tuple[str, Any]], where: str) -> bool:
    """Return whether the parser takes values of a file, or of the command line."""
    given = [(REQUIRED, "any"), *values]  # of two values the second counts
    try:
        if where:
            parser.parse_object(_nested(dict(given)))
        else:
            parser.parse_args([f"--{key}={value}" for key, value in given])
    except (ArgumentError, TypeError, ValueError):
        return False
    return True


def _parser() -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    for name, section in SECTIONS.items():
        parser.add_class_arguments(section, name)
    parser.add_class_arguments(TaskSettings)
    parser.add_argument("--seed_everything", type=KEYS["seed_everything"])
    return parser


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return nested
