"""What a run will need, before it begins: memory, disk, arithmetic and time."""

from aespa_pl.planning.table import plan

__all__ = ["plan"]
