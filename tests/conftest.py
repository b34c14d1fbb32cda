"""What all tests share."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Every test starts from the same random numbers, alone or in the suite."""
    torch.manual_seed(0)
