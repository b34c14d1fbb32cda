"""The tests of several processes share a small model and the runs of one process."""

from collections.abc import Sequence

import pytest

from tests.distributed.bench import Bench, Whole
from tests.forks import Forks
from tests.walks import save_short


@pytest.fixture(scope="module")
def bench(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("bench")
    save_short("llama-grouped", folder / "model")
    return Bench(folder, forks)


@pytest.fixture(scope="module")
def whole(bench: Bench) -> Whole:
    """Does the runs of one process, each set of options once."""
    done: dict[Sequence[str], str] = {}

    def get(*options: str) -> str:
        if options not in done:
            done[options] = f"one_{len(done)}"
            outcome = bench.fit(done[options], *options)
            assert outcome.status == 0, outcome.text
        return done[options]

    return get
