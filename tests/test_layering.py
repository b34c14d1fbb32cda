"""Imports point one way, and the mathematics knows neither Lightning nor transformers."""

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

import aespa_pl
from aespa_pl import models

PACKAGE = Path(aespa_pl.__file__).parent
MAY_IMPORT: dict[str, set[str]] = {
    "algorithm": set(),
    "errors": set(),
    "timing": set(),
    "progress": set(),
    "interruption": set(),
    "settings": set(),
    "ranks": set(),
    "shards": {"algorithm", "ranks"},
    "launch": {"errors", "ranks"},
    "models": {"errors"},
    "data": {"errors", "settings"},
    "artifacts": {"errors"},
    "rounding": {"algorithm", "settings", "shards"},
    "hidden": {"artifacts"},
    "heads": {"algorithm", "hidden"},
    "parts": set(),
    "gram": set(),
    "attended": {"algorithm", "models"},
    "statistics": {"algorithm", "attended", "gram", "heads", "models"},
    "stream": {"hidden", "models"},
    "preparation": {
        "algorithm", "heads", "models", "ranks", "settings", "shards", "statistics",
    },
    "evaluation": {"errors", "hidden", "ranks", "stream"},
    "run": {"artifacts", "errors"},
    "checkpoints": {"artifacts", "interruption", "ranks", "rounding", "run", "settings"},
    "search": {
        "algorithm", "artifacts", "errors", "models", "parts", "preparation", "ranks", "rounding",
        "run", "settings", "shards", "statistics", "timing",
    },
    "walk": {
        "algorithm", "artifacts", "errors", "heads", "hidden", "models", "parts", "preparation",
        "progress", "ranks", "run", "search", "settings", "statistics", "stream", "timing",
    },
    "planning": {
        "algorithm", "attended", "errors", "gram", "models", "parts", "ranks", "settings", "timing",
    },
    "commands": {
        "", "artifacts", "data", "errors", "evaluation", "models", "planning", "preparation",
        "progress", "ranks", "run", "settings", "stream", "timing", "walk",
    },
    "cli": {
        "artifacts", "checkpoints", "commands", "errors", "interruption", "launch", "models",
        "planning", "progress", "ranks", "run", "settings",
    },
    "__main__": {"cli"},
    "": set(),
}  # fmt: skip
"""By part, a file or folder of the package, the parts that it may import; "" is the package."""
OUTSIDE: dict[str, set[str]] = {
    "algorithm": {"torch", "jaxtyping"},
    "settings": {"jsonargparse"},
    "ranks": {"torch"},
    "shards": {"torch"},
    "gram": {"torch"},
    "attended": {"torch"},
    "statistics": {"torch"},
    "preparation": {"torch"},
    "rounding": {"torch", "lightning"},
    "models": {"torch", "transformers", "safetensors", "huggingface_hub"},
}
"""By part, the libraries beyond Python's own that it may import; other parts may any."""
FAMILIES = {*models.MODEL_TYPES, *(type(family).__name__.lower() for family in models.FAMILIES)}
STANDARD = set(sys.stdlib_module_names)


def part_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
PARTS = sorted({part_of(path) for path in FILES.values()})


def imported(path: Path) -> Iterator[str]:
    """Return the modules that a file imports, anywhere in it; ``from a import b`` is ``a.b``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own(path: Path) -> set[str]:
    """Return the parts of the package that a file imports."""
    names = {f"{name}.".split(".")[1] for name in imported(path) if is_own(name)}
    return {name if name in PARTS else "" for name in names}


def is_own(name: str) -> bool:
    return f"{name}.".startswith("aespa_pl.")


def test_every_part_has_rules() -> None:
    assert set(PARTS) - {"embedded"} == MAY_IMPORT.keys()


def test_rules_have_no_circle() -> None:
    order = list(TopologicalSorter(MAY_IMPORT).static_order())
    for lower, higher in (
        ("walk", "commands"), ("commands", "cli"), ("rounding", "walk"), ("models", "walk"),
        ("statistics", "walk"), ("algorithm", "rounding"), ("algorithm", "preparation"),
    ):  # fmt: skip
        assert order.index(lower) < order.index(higher)
    with pytest.raises(CycleError):
        list(TopologicalSorter({**MAY_IMPORT, "algorithm": {"walk"}}).static_order())


@pytest.mark.parametrize("file", FILES)
def test_file_imports_only_what_its_part_may(file: str) -> None:
    path = FILES[file]
    part = part_of(path)
    assert own(path) - {part} <= MAY_IMPORT[part]


@pytest.mark.parametrize("file", [file for file, path in FILES.items() if part_of(path) in OUTSIDE])
def test_file_imports_only_the_libraries_its_part_may(file: str) -> None:
    path = FILES[file]
    outside = {name.split(".")[0] for name in imported(path) if not is_own(name)} - STANDARD
    assert outside <= OUTSIDE[part_of(path)]


def test_rules_name_nothing_that_is_not_imported() -> None:
    """A permission that nobody needs hides the import that should not be."""
    used: dict[str, set[str]] = {part: set() for part in MAY_IMPORT}
    for path in FILES.values():
        used[part_of(path)] |= own(path) - {part_of(path)}
    assert used == MAY_IMPORT


@pytest.mark.parametrize("file", FILES)
def test_nothing_private_is_imported(file: str) -> None:
    names = [name for name in imported(FILES[file]) if not name.startswith("__future__")]
    private = [n for n in names if any(p[0] == "_" and p != "__version__" for p in n.split("."))]
    assert private == []


@pytest.mark.parametrize(
    "file", [file for file, path in FILES.items() if part_of(path) not in ("models", "embedded")]
)
def test_family_is_named_in_models_only(file: str) -> None:
    """Names of families may stand in texts for the user: help and messages."""
    tree = ast.parse(FILES[file].read_text(encoding="utf-8"))
    names = {node.id.lower() for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr.lower() for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    compared = {
        str(value.value).lower()
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        for value in ast.walk(node)
        if isinstance(value, ast.Constant)
    }
    assert (names | compared) & FAMILIES == set()


@pytest.mark.parametrize("file", FILES)
def test_every_module_says_what_it_is_for(file: str) -> None:
    name = "aespa_pl." + file.removesuffix(".py").replace("/", ".").removesuffix("__init__")
    if file != "__main__.py":
        assert import_module(name.rstrip(".")).__doc__
