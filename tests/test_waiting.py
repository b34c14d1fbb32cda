"""Threads that wait for each other spin for a moment and then sleep, unless the user says otherwise."""

import os
import subprocess
import sys

import pytest

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
SHOW = (
    "import os; from aespa_pl.__main__ import set_threads; set_threads();"
    f"print([os.environ.get(name) for name in {VARIABLES}])"
)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ["passive", "1500"]),
        ({"OMP_WAIT_POLICY": "active"}, ["active", None]),
        ({"GOMP_SPINCOUNT": "7"}, ["passive", "7"]),
    ],
)
def test_waiting_threads_sleep_unless_the_environment_says_otherwise(
    given: dict[str, str], expected: list[str | None]
) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in VARIABLES} | given
    shown = subprocess.run(
        [sys.executable, "-c", SHOW], env=environment, capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == str(expected)


def test_torch_is_not_imported_before_the_setting() -> None:
    """OpenMP reads the variable once, when torch is imported."""
    show = "import aespa_pl.__main__, sys; print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"
