"""Kill one run 200 times at random moments and compare its files with the files of an undisturbed one.

python benchmarks/kills.py [--kills 200]

The longer variant of a test: ``tests/run/test_resume.py`` has the run, the kills and the comparison.
"""

import os
import subprocess
import sys
from pathlib import Path

from jsonargparse import auto_cli

ROOT = Path(__file__).parent.parent


def main(*, kills: int = 200) -> None:
    """Run the test with more kills; its exit status is the benchmark's.

    Args:
        kills: SIGKILLs over all runs.
    """
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "tests/run/test_resume.py",
        "-k",
        "at_any_moment",
    ]
    environment = {**os.environ, "AESPA_KILLS": str(kills)}
    sys.exit(subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode)


if __name__ == "__main__":
    auto_cli(main)
