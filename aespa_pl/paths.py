"""Read the paths that a user gives."""

import os
from pathlib import Path


def expanded(given: str | Path) -> Path:
    """Return a path with the user's folder in place of ``~``; an unknown ``~user`` stays as it is."""
    return Path(os.path.expanduser(given))  # noqa: PTH111 - Path.expanduser raises for an unknown user
