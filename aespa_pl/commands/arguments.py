"""Read the words of a command line and the YAML files that they name, without a large import.

``fit``, ``test``, ``plan``, ``compare`` and the Python call share one set of keys.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, Self, get_type_hints

import yaml

from aespa_pl.errors import UserError
from aespa_pl.settings import SECTIONS, Seed, TaskSettings, keys_of

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
PLAN_DEVICE = "plan.device"
"""The key that only plan takes."""


class Option(NamedTuple):
    """Holds the value of a key; None is a key of the command line that no value follows."""

    key: str
    value: Any
    file: str = ""
    """Configuration that has the key; empty for the command line."""

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
        """Divide a command line into options. Raises UserError where a word belongs to no option."""
        if any(word == "-h" or re.fullmatch(r"--(.*\.)?help", word) for word in words):
            return cls((), wants_help=True)
        options, rest = [], list(words)
        while rest:
            word = rest.pop(0)
            if not word.startswith("--"):
                raise UserError(
                    f"{word} stands alone: a key comes before each value, such as --config {word}"
                )
            key, equals, text = word.removeprefix("--").partition("=")
            value = text if equals else None
            if not (equals or FLAGS.match(word)) and rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            options.append(Option(key, value))
        return cls(tuple(options))

    @property
    def words(self) -> list[str]:
        """Return the options as they are typed."""
        return [word for option in self.options for word in option.words]

    def last(self, key: str) -> str | None:
        """Return the value that was given to a key, None if there is none."""
        return next((o.value for o in reversed(self.options) if o.key == key), None)

    def given(self) -> list[Option]:
        """Return all keys in their order, those of a configuration in its place; the last one counts."""
        keys: list[Option] = []
        for option in self.options:
            if option.key == "config" and option.value:
                content = read_configuration(Path(option.value))
                keys += [Option(key, value, option.value) for key, value in leaves(content)]
            else:
                keys.append(Option(option.key.removesuffix("+"), option.value))
        return keys

    def setting(self, key: str, default: str) -> str:
        """Return the value of a key among the options or in their configurations."""
        values = [str(each.value) for each in self.given() if each.key == key and each.value]
        return values[-1] if values else default

    def with_configurations(self) -> Self:
        """Return the options with the path of each configuration. Raises UserError if one isn't there."""
        options = (
            Option(o.key, str(find_configuration(o.value))) if o.key == "config" and o.value else o
            for o in self.options
        )
        return replace(self, options=tuple(options))

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
    """Return the file of a configuration, here or of the package. Raises UserError where there is neither."""
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


def read_configuration(path: Path) -> Mapping[str, Any]:
    """Read a YAML file of sections. Raises UserError where it is no text, no YAML, or has no keys."""
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
    values: list[tuple[str, Any]] = []
    for name, value in content.items():
        key = f"{prefix}{name}"
        is_section = any(known.startswith(f"{key}.") for known in KEYS)
        if isinstance(value, Mapping) and (is_section or key not in KEYS):
            values += leaves(value, f"{key}.")
        else:
            values.append((key, value))
    return values
