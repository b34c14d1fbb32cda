"""Commands, options and files that the texts name exist."""

import ast
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import cache, partial
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest

from aespa_pl.models import FAMILIES

ROOT = Path(__file__).parent.parent
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))]
SCRIPTS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("benchmarks", "scripts")
    for path in (ROOT / folder).glob("*.py")
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
)
COMMAND = re.compile(
    r"""(?:^\s*|`|bin/|-m\s|&&\s|=\S+\s)  # where a command begins
    (?:aespa[-_]pl\s+(?P<command>[a-z]+)|python\s+(?P<script>\S+\.py))
    (?P<words>[^`|;&\#]*)""",
    re.VERBOSE,
)
OPTION = re.compile(r"(?<!\S)--([A-Za-z_][\w.-]*)")
FOREIGN = {"kill-on-bad-exit"}
"""Options of other programs that stand in a text without their program."""
INLINE = re.compile(r"`+([^`]+)`+")
OWN_FILE = re.compile(r"(?<![\w./-])(?:aespa_pl|benchmarks|configs|docs|scripts|tests)/[\w.*/-]*\w")
LINK = re.compile(r"\]\(([\w./-]+)\)")


def text_of(name: str) -> str:
    """Return a document, or the docstring of a script, with continued lines joined."""
    text = (ROOT / name).read_text(encoding="utf-8")
    if name.endswith(".py"):
        text = ast.get_docstring(ast.parse(text)) or ""
    return re.sub(r"\s*\\\n\s*", " ", text)


def commands(text: str) -> Iterator[tuple[str, set[str]]]:
    """Yield each call of a program of ours, "fit" or "benchmarks/x.py", with its options."""
    for line in text.splitlines():
        for match in COMMAND.finditer(line):
            program = match["command"] or match["script"]
            if match["command"] or program in SCRIPTS:
                yield program, set(OPTION.findall(match["words"]))


def lone_options(text: str) -> set[str]:
    """Return the options that stand in a text without a program: ``--trainer.devices 2``."""
    spans = INLINE.findall(text)
    return {name for s in spans if s.startswith("--") for name in OPTION.findall(s)} - FOREIGN


COMMANDS = sorted({program for name in DOCUMENTS for program, _ in commands(text_of(name))} - set(SCRIPTS))
"""Commands of aespa-pl that a document names."""


@cache
def options_of(program: str) -> set[str]:
    """Return the options that ``--help`` of a program shows.

    It runs in this process: so the libraries are imported once for all programs.
    """
    is_script = program in SCRIPTS
    words = [program, "--help"] if is_script else ["aespa-pl", program, "--help"]
    text = shown_by(program, words)
    if program in ("fit", "test", "plan", "compare"):  # whose help shows the common keys, and sections
        sections = ("model", "data", "quantization", "output", "trainer")
        text += "".join(shown_by(program, [*words, name]) for name in sections)
        text += shown_by(program, [*words, "tasks"]) if program == "test" else ""
    return set(OPTION.findall(re.sub(r"[\[|,]", " ", text)))


def shown_by(program: str, words: list[str]) -> str:
    """Return what a program prints and ends with."""
    run: Callable[..., object] = partial(runpy.run_module, "aespa_pl")
    if program in SCRIPTS:
        run = partial(runpy.run_path, str(ROOT / program))
    sys.modules.pop("aespa_pl.__main__", None)  # runpy warns where a script has imported it
    path = [str(ROOT / "benchmarks"), *sys.path]  # a script's own folder comes first
    with (
        patch.object(sys, "argv", words),
        patch.object(sys, "path", path),
        redirect_stdout(StringIO()) as shown,
        pytest.raises(SystemExit) as end,
    ):
        run(run_name="__main__")
    assert end.value.code in (0, None)
    return shown.getvalue()


@pytest.mark.parametrize("program", [*COMMANDS, *SCRIPTS])
def test_help_shows_every_option_that_a_text_gives_a_program(program: str) -> None:
    shown = options_of(program)
    assert shown
    for name in [*DOCUMENTS, *SCRIPTS]:
        named = {o for p, options in commands(text_of(name)) if p == program for o in options}
        assert named - shown == set(), name


@pytest.mark.parametrize("name", [*DOCUMENTS, *SCRIPTS])
def test_every_option_that_a_text_names_alone_exists(name: str) -> None:
    """It is one of a command, of the script itself, or of a script that the text calls."""
    text = text_of(name)
    programs = {*COMMANDS, *(p for p, _ in commands(text)), *({name} & {*SCRIPTS})}
    named = lone_options(text)
    assert named - set().union(*(options_of(p) for p in sorted(programs) if named)) == set()


def test_readme_lists_the_families() -> None:
    titles = ", ".join(family.title for family in FAMILIES)
    assert f"* **Models**: {titles};" in " ".join(text_of("README.md").split())


@pytest.mark.parametrize("name", [*DOCUMENTS, *SCRIPTS])
def test_every_file_that_a_text_names_exists(name: str) -> None:
    text = text_of(name)
    named = set(OWN_FILE.findall(text))
    assert {n for n in named if not list(ROOT.glob(n))} == set()
    links = {ROOT / Path(name).parent / link for link in LINK.findall(text)}
    assert {link for link in links if not link.exists()} == set()
