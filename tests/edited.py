"""A JSON or YAML file is changed in its place."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml


@contextmanager
def edited(file: Path) -> Iterator[Any]:
    """Give the content of a file to a context that changes it."""
    is_json = file.suffix == ".json"
    content = json.loads(file.read_text()) if is_json else yaml.safe_load(file.read_text())
    yield content
    file.write_text(json.dumps(content) if is_json else yaml.safe_dump(content))
