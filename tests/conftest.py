"""Set up what all tests share."""

import gc
import os

# Two workers of two threads each on two cores wait for each other most of the time; children inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

torch.set_num_threads(1)


# Flushing to the disk is against power failures, which no test has; it takes 12 ms a file.
os.fsync = lambda fd: None


def pytest_collection_finish() -> None:
    """Leave what was imported out of garbage collections: a walk asks for several, of 0.4 s each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Every test starts from the same random numbers, alone or in the suite."""
    torch.manual_seed(0)
