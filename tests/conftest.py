"""Set up what all tests share."""

import gc
import os
from collections.abc import Iterator

# Two workers of two threads each on two cores wait for each other most of the time; children inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
# Of two threads in a test none waits by turning round and round, which takes the processor from other tests.
os.environ["OMP_WAIT_POLICY"] = "passive"

import pytest
import torch

import tests.shapes  # noqa: F401  (pytest's option for jaxtyping names it)
from tests.forks import Forks, started

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let ``pytest --gpu tests/device/test_gpu.py`` see the GPU."""
    parser.addoption("--gpu", action="store_true", help="let the tests see the GPU")


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs: Lightning would take one by itself, where a test holds its tensors on the CPU."""
    if not config.getoption("--gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


# Flushing to the disk is against power failures, which no test has; it takes 12 ms a file.
os.fsync = lambda fd: None


def pytest_collection_finish() -> None:
    """Leave what was imported out of garbage collections: a walk asks for several, of 0.4 s each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The cache of the user who runs the tests stays as it is."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """The process that runs command lines in forks of itself; it takes seconds to start."""
    with started(tmp_path_factory.mktemp("forks")) as process:
        yield process


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Every test starts from the same random numbers, alone or in the suite."""
    torch.manual_seed(0)
