"""Runs that many tests export: each is made once, and no test changes one."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.edited import edited
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
def fresh(known: MakeRun, tmp_path: Path) -> Known:
    """Return a copy of a run and its original, which the test may damage."""
    run = known("llama", 4, 32)
    original, folder = tmp_path / "original", tmp_path / "version_0"
    shutil.copytree(run.original, original)
    shutil.copytree(run.folder, folder)
    with edited(folder / "config.yaml") as settings:
        settings["model"]["pretrained"] = str(original)
    return replace(run, folder=folder, original=original)
