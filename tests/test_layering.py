"""Imports point one way, and the mathematics knows neither Lightning nor transformers."""

import ast
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import aespa_pl
from aespa_pl import models

PACKAGE = Path(aespa_pl.__file__).parent
ORDER = (
    "processors",
    "",
    "errors",
    "extras",
    "paths",
    "methods",
    "settings",
    "resolve",
    "measure",
    "progress",
    "curve_names",
    "fitting",
    "algorithm",
    "storage",
    "distributed",
    "models",
    "data",
    "calibration",
    "planning",
    "rounding",
    "tuning",
    "run",
    "block",
    "walk",
    "evaluation",
    "export",
    "sizing",
    "report",
    "commands",
    "in_memory",
    "api",
    "cli",
    "__main__",
)
"""The parts of the package, files and folders; each may import those before it. "" is the package."""
OUTSIDE: dict[str, set[str]] = {
    "algorithm": {"torch", "jaxtyping"},
    "methods": set(),
    "extras": set(),
    "settings": {"jsonargparse"},
    "resolve": set(),
    "curve_names": set(),
    "fitting": {"lightning"},
    "distributed": {"torch", "lightning"},
    "calibration": {"torch"},
    "rounding": {"torch", "lightning"},
    "tuning": {"torch", "lightning"},
    "models": {"torch", "transformers", "safetensors", "huggingface_hub"},
}
"""Libraries beyond Python's own that a part may import; parts that are missing here may import any."""
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


def test_every_part_has_a_place() -> None:
    assert set(PARTS) - {"embedded"} == set(ORDER)


def test_files_import_only_parts_before_their_own() -> None:
    found = {}
    for file, path in FILES.items():
        part = part_of(path)
        if file != "__init__.py":  # whose imports wait until they are used
            found[file] = own(path) - {part, *ORDER[: ORDER.index(part)]}
    assert {file: wrong for file, wrong in found.items() if wrong} == {}


def test_files_import_only_the_libraries_that_their_part_may() -> None:
    found = {}
    for file, path in FILES.items():
        outside = {name.split(".")[0] for name in imported(path) if not is_own(name)} - STANDARD
        found[file] = outside - OUTSIDE.get(part_of(path), outside)
    assert {file: wrong for file, wrong in found.items() if wrong} == {}


def test_nothing_private_is_imported() -> None:
    names = {name for path in FILES.values() for name in imported(path) if not name.startswith("__future__")}
    assert {n for n in names if any(p[0] == "_" and p != "__version__" for p in n.split("."))} == set()


def test_families_are_named_in_models_only() -> None:
    """Names of families may stand in texts for the user: help and messages."""
    found = {}
    for file, path in FILES.items():
        if part_of(path) in ("models", "embedded"):
            continue
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        names = {node.id.lower() for node in nodes if isinstance(node, ast.Name)}
        names |= {node.attr.lower() for node in nodes if isinstance(node, ast.Attribute)}
        compared = {
            str(value.value).lower()
            for node in nodes
            if isinstance(node, ast.Compare)
            for value in ast.walk(node)
            if isinstance(value, ast.Constant)
        }
        found[file] = (names | compared) & FAMILIES
    assert {file: wrong for file, wrong in found.items() if wrong} == {}


def test_every_module_says_what_it_is_for() -> None:
    names = (file.removesuffix(".py").replace("/", ".").removesuffix("__init__") for file in FILES)
    modules = (f"aespa_pl.{name}".rstrip(".") for name in names if name != "__main__")
    assert [module for module in modules if not import_module(module).__doc__] == []
