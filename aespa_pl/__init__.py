"""Quantize language models to few bits with aespa, as a PyTorch Lightning application."""

import os

from aespa_pl.processors import threads

# A run is continued, and a perplexity remembered, by the same version alone: it rises where results change.
__version__ = "0.2.0.dev0"

# OpenMP reads this when torch is imported. A thread that waits for the others spins for some microseconds,
# which bridges the gap between two operations, and then sleeps: one that spins on takes the core of a thread
# that it waits for where other processes run (benchmarks/busy_machine.py).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "passive"
    os.environ.setdefault("GOMP_SPINCOUNT", "1500")

# A container's quota of processor time, of which OpenMP knows nothing.
if (quota := threads()) is not None:
    os.environ.setdefault("OMP_NUM_THREADS", str(quota))
