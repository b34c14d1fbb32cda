"""Write numbers and times as people say them."""

import math

PREFIXES = ("", "K", "M", "G", "T", "P", "E")


def human(number: float) -> str:
    """Return a number in powers of a thousand: ``12.3 G``."""
    power = 0 if number < 1 else min(len(PREFIXES) - 1, int(math.log10(number)) // 3)
    return f"{number / 1000**power:.1f} {PREFIXES[power]}"


def duration(seconds: float) -> str:
    """Return seconds in the unit that a person would choose."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
