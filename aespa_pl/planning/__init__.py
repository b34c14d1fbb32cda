"""Compute what a run will need, before it begins: memory, disk, arithmetic and time."""
