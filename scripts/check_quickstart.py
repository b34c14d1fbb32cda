"""Compare the table that the quickstart printed with the one in README.md.

make quickstart | tee quickstart.log && python scripts/check_quickstart.py quickstart.log
"""

import re
import sys
from pathlib import Path

from jsonargparse import auto_cli

README = Path(__file__).parent.parent / "README.md"
TOLERANCES = {"original": 0.01, "round-to-nearest": 0.5, "aespa-tuned": 0.5}
"""Perplexity by column. Processors add up in different orders. The original model's perplexity changes in
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
    """Return the perplexity of each model of TOLERANCES; cells have ``|`` or spaces between them."""
    text, cell, number = file.read_text(encoding="utf-8"), r"[ |]+", r"([\d.]+|nan|inf)"
    head, row = cell.join(TOLERANCES), cell.join(["perplexity, embedded", *[number] * len(TOLERANCES)])
    found = re.search(rf"^{cell}{head}[ |]*\n.*\n{cell}{row}[ |]*$", text, re.MULTILINE)
    if found is None:
        sys.exit(f"{file} has no perplexities of {', '.join(TOLERANCES)}")
    return dict(zip(TOLERANCES, map(float, found.groups()), strict=True))


if __name__ == "__main__":
    auto_cli(main)
