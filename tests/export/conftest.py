"""Runs that many tests export: each is made once, and no test changes one."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.export.runs import CONFIGS, Known, make_run, save_original

MakeRun = Callable[..., Known]


@pytest.fixture(scope="session")
def known(tmp_path_factory: pytest.TempPathFactory) -> MakeRun:
    """Return a function from a model's name, bits and group size to a run."""

    @cache
    def original(name: str) -> Path:
        return save_original(CONFIGS[name](), tmp_path_factory.mktemp(name))

    @cache
    def run(name: str, bits: int, group_size: int | None, *, symmetric: bool = False) -> Known:
        folder = tmp_path_factory.mktemp(f"{name}-{bits}") / "version_0"
        with torch.no_grad():
            return make_run(original(name), folder, bits, group_size, symmetric=symmetric)

    return run


@pytest.fixture
def fresh(tmp_path: Path) -> Known:
    """Return a run of its own, which the test may damage."""
    with torch.no_grad():
        source = save_original(CONFIGS["llama"](), tmp_path / "original")
        return make_run(source, tmp_path / "version_0", 4, 32)
