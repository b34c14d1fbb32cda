"""Read the words of a command line, and the YAML files and runs that they name, without a large import."""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import yaml

from aespa_pl.errors import UserError
from aespa_pl.paths import expanded
from aespa_pl.run.find import LAST, find_run, last_run
from aespa_pl.settings import SECTIONS, OutputSettings, Seed, keys_of

KEYS: dict[str, Any] = {
    key: kind for name, section in SECTIONS.items() for key, kind in keys_of(section, name).items()
} | {"seed_everything": bool | Seed}
"""Type of each key of a configuration, but those of the section that Lightning checks."""
FREE = "trainer"  # the section that Lightning checks
FLAG = "print_config"  # the key that takes no value
REQUIRED = "model.pretrained"
CKPT_PATH = "ckpt_path"
TRUST = "trust_run"
CONFIGURATION = "config.yaml"
WORDS = ("accelerator", "precision", "strategy", "profiler", "devices", "gradient_clip_algorithm")
"""Keys of the ``trainer`` section whose texts name something of Lightning's."""


class Option(NamedTuple):
    """Holds the value of a key; None is a key of the command line that no value follows."""

    key: str
    value: Any
    file: str = ""  # configuration that has the key; empty for the command line


@dataclass(frozen=True)
class Arguments:
    """Holds the options of a command in their order; the last one of a key wins."""

    options: tuple[Option, ...]

    @classmethod
    def read(cls, words: Sequence[str]) -> Self:
        """Divide a command line into options. Raises UserError where a word belongs to no option."""
        options, rest = [], list(words)
        while rest:
            word = rest.pop(0)
            if not word.startswith("--"):
                raise UserError(
                    f"{word} stands alone: a key comes before each value, such as --config {word}"
                )
            key, equals, text = word.removeprefix("--").partition("=")
            value = text if equals else None
            if not equals and key != FLAG and rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            options.append(Option(key, value))
        return cls(tuple(options))

    @property
    def words(self) -> list[str]:
        """Return the options as they are typed."""
        return [f"--{key}" if value is None else f"--{key}={value}" for key, value, _ in self.options]

    def last(self, key: str) -> str | None:
        """Return the value that was given to a key, None if there is none."""
        return {option.key: option.value for option in self.options}.get(key)

    def given(self) -> list[Option]:
        """Return all keys in order, those of a configuration or section in its place; the last one counts."""
        keys: list[Option] = []
        for option in self.options:
            if option.key == "config" and option.value:
                content = read_configuration(Path(option.value))
                keys += [Option(key, value, option.value) for key, value in leaves(content)]
            else:
                keys.append(option)
        return [inner for option in keys for inner in _of_section(option)]

    def setting(self, key: str, default: str) -> str:
        """Return the value of a key among the options or in their configurations."""
        value = {option.key: option.value for option in self.given()}.get(key)
        return str(value) if value else default

    def with_configurations(self) -> Self:
        """Return the options with the path of each configuration. Raises UserError if one isn't there."""
        options = (
            Option(o.key, str(_configuration(o.value))) if o.key == "config" and o.value else o
            for o in self.options
        )
        return replace(self, options=tuple(options))

    def without(self, name: str) -> Self:
        """Return the options without a key, and without those of a section of that name."""
        return replace(self, options=tuple(o for o in self.options if o.key.partition(".")[0] != name))

    def then(self, *options: Option) -> Self:
        """Return these options with others behind them, which win."""
        return replace(self, options=(*self.options, *options))


def _of_section(option: Option) -> list[Option]:
    """Return the keys in a section that is given whole: in YAML, or in a file beside the configuration."""
    is_section = option.key == FREE or any(key.startswith(f"{option.key}.") for key in KEYS)
    if not is_section or not isinstance(option.value, str):
        return [option]
    try:
        content = yaml.safe_load(option.value)
    except yaml.YAMLError:
        return [option]
    if isinstance(content, str):
        path = Path(option.file).parent / expanded(content)
        content = read_configuration(path) if path.is_file() else None
    if not isinstance(content, Mapping):
        return [option]
    return [Option(key, value, option.file) for key, value in leaves({option.key: content})]


def _configuration(name: str) -> Path:
    """Return the file of a configuration, here or of the package."""
    here = expanded(name)
    packaged = {path.name: path for path in Path(__file__).parents[1].glob("configs/*.yaml")}
    if here.exists():
        return here
    if found := packaged.get(name, packaged.get(f"{name}.yaml")):
        return found
    raise UserError(
        f"config: there is no file {name} here, and none of that name comes with aespa-pl: give a "
        f"file, or one of {', '.join(sorted(packaged))}"
    )


class _EachKeyOnce(yaml.SafeLoader):
    """Reads YAML where no section has a key twice, of which YAML would lose the first in silence."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node, lines = super().compose_mapping_node(anchor), dict[str, int]()
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in lines:
                raise UserError(
                    f"config: {key.start_mark.name} has {key.value} in line {lines[key.value]} and in line "
                    f"{line}: put both under one"
                )
            lines[key.value] = line
        return node


def read_configuration(path: Path) -> Mapping[str, Any]:
    """Read a YAML file of sections. Raises UserError where it is no text, no YAML, or has no keys."""
    try:
        with path.open(encoding="utf-8") as file:
            content = _EachKeyOnce(file).get_single_data()
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
        inner = isinstance(value, Mapping) and key not in KEYS
        values += leaves(value, f"{key}.") if inner else [(key, value)]
    return values


def with_run(arguments: Arguments, command: str) -> Arguments:
    """Return the arguments with the folder of the run as ``ckpt_path``, and with its configuration.

    ``last`` stays where there is no run yet. The configuration is taken where the command line names no
    other, and with ``last`` no model; test alone takes the last run without being asked. Raises UserError
    where ``ckpt_path`` names no run, or the configuration names code or places that the user has not
    confirmed, or where the command line names the place of another run.
    """
    answers = [o.value for o in arguments.options if o.key == TRUST]
    if other := next((a for a in answers if a not in (None, "true", "false")), None):
        raise UserError(f"{TRUST} is {other}: expected true or false")
    trusts = any(answer != "false" for answer in answers)
    arguments = arguments.without(TRUST)
    default, which = OutputSettings(), arguments.setting(CKPT_PATH, "null")
    # beside a run that is named, a model is where that of the run lies now
    has_settings = arguments.last("config") or (which in (LAST, "null") and arguments.setting(REQUIRED, ""))
    runs = expanded(arguments.setting("output.folder", default.folder))
    name = arguments.setting("output.name", default.name if has_settings else "")
    if which == "null" and command == "test":
        which = LAST
    smoke = arguments.setting("trainer.fast_dev_run", "false") not in ("false", "null", "0")
    is_new = which == LAST and has_settings and (smoke or last_run(runs, name) is None)
    if which == "null" or is_new:
        return arguments
    folder = find_run(which, runs, name)
    if which != LAST:
        _refuse_another_place(arguments, folder)
    named = arguments.then(Option(CKPT_PATH, str(folder)))
    configuration = folder / CONFIGURATION
    if has_settings:
        return named
    try:
        content = read_configuration(configuration)
        if not content:
            raise UserError(f"config: {configuration} is empty")
    except UserError as error:
        raise UserError(f"{error}: restore it, or give the run's configuration with --config") from error
    content = {} if trusts or is_own(folder) else content
    if keys := sorted({key for key, value in leaves(content) if not _is_data(key, value)}):
        raise UserError(
            f"{configuration} names code to run or places to write to ({', '.join(keys)}), and "
            f"you have not run this configuration here: read it, and add --{TRUST} true if you trust it, or "
            "give your own with --config"
        )
    own = (
        Option("config", str(configuration)),
        # where it lies now, which may not be where it was begun
        Option("output.folder", str(folder.parent.parent)),
        Option("output.name", folder.parent.name),
    )
    return replace(named, options=(*own, *named.options))  # of which the later ones win


def _refuse_another_place(arguments: Arguments, run: Path) -> None:
    """Raise UserError where options name another place than that of the run, which goes on where it is."""
    place = run.parent
    given = [key for key in ("output.folder", "output.name") if arguments.last(key)]
    folder = expanded(arguments.last("output.folder") or place.parent)
    if (folder / (arguments.last("output.name") or place.name)).resolve() != place.resolve():
        raise UserError(
            f"{CKPT_PATH} names {run}, which goes on where it is: leave out {' and '.join(given)}, or begin "
            f"a new run without {CKPT_PATH}"
        )


def is_own(run: Path) -> bool:
    """Return whether the configuration of a run is one that this user has run."""
    return _mark(run).exists()


def note_own(run: Path) -> None:
    """Remember that this user has run the configuration of a run, so that it needs no confirmation."""
    with suppress(OSError):  # without a place for it, the user is asked
        mark = _mark(run)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def _mark(run: Path) -> Path:
    from aespa_pl.storage.cache import cache_folder  # noqa: PLC0415 - torch takes seconds

    try:
        name = hashlib.sha256((run / CONFIGURATION).read_bytes()).hexdigest()
    except OSError:
        name = "none"
    return cache_folder() / "own_configurations" / name


def _is_data(key: str, value: Any) -> bool:
    """Return whether a value neither runs anything nor says where something is written."""
    section, _, name = key.partition(".")
    if section in SECTIONS:  # an unknown key of these is refused later; a section in a file may hold any
        return key.rstrip("+") not in (section, "data.cache") or value is None
    if section != FREE:
        return key in KEYS
    if isinstance(value, str):
        return name in WORDS and value.replace("-", "").replace("_", "").isalnum()
    return not isinstance(value, Mapping | list) or (
        name == "devices" and all(isinstance(item, int) for item in value)
    )
