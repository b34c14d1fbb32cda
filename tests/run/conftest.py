"""The tests of runs share an empty run, and runs of a small model that were finished or stopped."""

import signal
from pathlib import Path

import pytest

from aespa_pl.run.journal import Run
from tests.forks import Forks
from tests.run.bench import Bench, results
from tests.run.journals import FINGERPRINT
from tests.walks import BLOCKS, save_short


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path, FINGERPRINT)


@pytest.fixture(scope="module")
def bench(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("bench")
    save_short("opt", folder / "model")
    return Bench(folder, forks)


@pytest.fixture(scope="module")
def whole(bench: Bench) -> dict[str, bytes]:
    """What a run leaves that nothing disturbed."""
    outcome = bench.fit("whole")
    assert outcome.status == 0, outcome.text
    found = results(bench.run_of("whole"))
    assert len(found) > 2 * BLOCKS + 4
    return found


@pytest.fixture(scope="module")
def stopped(bench: Bench) -> Path:
    """A run whose first block is complete, and whose second has a checkpoint."""
    outcome = bench.fit("half", number=signal.SIGTERM, when="*/checkpoints/block_001/*.ckpt")
    assert outcome.status == 143, outcome.text
    return bench.run_of("half")
