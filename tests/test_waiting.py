"""Threads that wait for each other sleep, unless the user says otherwise."""

import os
import subprocess
import sys

import pytest

SHOW = "import aespa_pl, os; print(os.environ['OMP_WAIT_POLICY'])"


@pytest.mark.parametrize(("given", "expected"), [(None, "passive"), ("active", "active")])
def test_waiting_threads_sleep_unless_the_environment_says_otherwise(
    given: str | None, expected: str
) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    if given is not None:
        environment["OMP_WAIT_POLICY"] = given
    shown = subprocess.run(
        [sys.executable, "-c", SHOW], env=environment, capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == expected


def test_torch_is_not_imported_before_the_setting() -> None:
    """OpenMP reads the variable once, when torch is imported."""
    show = "import aespa_pl, sys; print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"
