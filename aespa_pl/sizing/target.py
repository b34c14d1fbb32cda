"""Read ``quantization.target``: the size that a model shall have."""

import re
from dataclasses import dataclass

from aespa_pl.errors import UserError

UNITS = {"kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}
"""Bytes of each unit, in small letters."""
SIZE = re.compile(r"(\d+\.?\d*|\.\d+)\s*([KMG]i?B)", re.IGNORECASE)


@dataclass(frozen=True)
class Target:
    """Holds a size: one of both is None."""

    bytes: float | None
    """Bytes of the whole file at most."""
    bits: float | None
    """Mean bits of a weight of the quantized matrices at most."""

    @classmethod
    def of(cls, given: float | str) -> "Target":
        """Read what a user gave. Raises UserError where it is no size."""
        if isinstance(given, int | float):
            return cls(None, float(given))
        if size := SIZE.fullmatch(given.strip()):
            return cls(float(size[1]) * UNITS[size[2].lower()], None)
        try:
            return cls(None, float(given))
        except ValueError as error:
            raise UserError(
                f"quantization.target is {given}: expected a size such as 3.5 GB or 300 MB, or bits a "
                "weight such as 2.75"
            ) from error
