"""Compare the table that the quickstart printed with the one in README.md.

make quickstart | tee quickstart.log && python scripts/check_quickstart.py quickstart.log
"""

import re
import sys
from pathlib import Path

from jsonargparse import auto_cli

README = Path(__file__).parent.parent / "README.md"
TOLERANCES = {"original": 0.01, "round-to-nearest": 0.5, "aespa-tuned": 0.5}
"""Perplexity by row. Processors add up in different orders. The original model's perplexity changes in
the last digits only. A weight in the middle between two integers may be rounded to the other one. Learning
takes another way on another processor or with another number of threads; README.md has one and two."""


def main(log: Path) -> None:
    """Print the differences; the exit status is 1 where one is larger than its tolerance.

    Args:
        log: What the quickstart printed.
    """
    expected, found = read_table(README), read_table(log)
    too_far = False
    for name, tolerance in TOLERANCES.items():
        difference = found[name] - expected[name]
        too_far |= not abs(difference) <= tolerance  # also where it is not a number
        print(f"{name}: {found[name]:.3f}, README.md has {expected[name]:.3f}, +- {tolerance}")
    if too_far:
        sys.exit("the quickstart's table differs from README.md by more than processors explain")


def read_table(file: Path) -> dict[str, float]:
    """Return the first number of each row of TOLERANCES; the lines of a table are ``|`` or drawn."""
    text = file.read_text(encoding="utf-8")
    rows = {
        name: re.search(rf"^\W*{name}\s*[|│]\s*([\d.]+|nan|inf)\s*[|│]", text, re.MULTILINE)
        for name in TOLERANCES
    }
    if missing := [name for name, row in rows.items() if row is None]:
        sys.exit(f"{file} has no table with rows {', '.join(missing)}")
    return {name: float(row[1]) for name, row in rows.items() if row is not None}


if __name__ == "__main__":
    auto_cli(main)
