"""An exported folder has files and a model card, which the tests look at."""

from pathlib import Path
from typing import Any

import yaml


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def card(folder: Path) -> tuple[dict[str, Any], str]:
    _, header, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(header), text
