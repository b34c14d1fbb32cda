"""Set up what all tests share."""

import os

# Two workers of two threads each on two cores wait for each other most of the time; children inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Every test starts from the same random numbers, alone or in the suite."""
    torch.manual_seed(0)
