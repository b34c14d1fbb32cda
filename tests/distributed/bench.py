"""A bench has a small model, runs it in one process or several, and compares what the runs found."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.forks import Outcome
from tests.run import bench
from tests.walks import BLOCKS

LAST = bench.LAST
TWO = ("--trainer.devices=2", "--trainer.strategy=ddp")
MANY = 5
"""Number of processes, more than batches (2), key/value heads (2) and query heads (4)."""


class Bench(bench.Bench):
    """Has a small model, and runs it in one process or several."""

    def options(self, name: str) -> dict[str, Any]:
        return super().options(name) | {
            "data.evaluation.texts": [str(self.folder / "words.txt")],
            "data.evaluation.max_segments": 5,
            "data.evaluation.round_to_nearest": "false",
            "data.batch_size": 4,
            "quantization.grid.max_rounds": 2,
            "quantization.rounding.iterations": 24,
            "trainer.log_every_n_steps": 10,
        }

    def fit(self, name: str, *more: str, processes: int = 1, **how: Any) -> Outcome:
        """Run ``fit`` in forks; ``when`` is a glob in the folder of the name's run."""
        if "when" in how:
            how["when"] = str(self.run(name) / how["when"])
        if processes > 1:
            more = (f"--trainer.devices={processes}", *more)
        return self.forks.run(self.arguments(name, *more), processes=processes, **how)

    def run(self, name: str) -> Path:
        return self.folder / "runs" / name / "version_0"

    def check(self, name: str, like: str) -> None:
        """Check that a run has found what another one has."""
        losses, expected_losses = (self.journal(n)["blocks"] for n in (name, like))
        for index in range(BLOCKS):
            file = f"blocks/block_{index:03}.safetensors"
            found, expected = (load_file(self.run(n) / file) for n in (name, like))
            assert found.keys() == expected.keys()
            integers = [key for key in expected if key.endswith(".integers")]
            equal = sum(int((found[key] == expected[key]).sum()) for key in integers)
            assert equal >= 0.999 * sum(expected[key].numel() for key in integers)
            for projection, loss in expected_losses[str(index)]["losses"].items():
                final = losses[str(index)]["losses"][projection]["final"]
                assert final == pytest.approx(loss["final"], rel=1e-3), projection
        metrics, expected_metrics = (
            json.loads((self.run(n) / "metrics.json").read_text()) for n in (name, like)
        )
        assert metrics.keys() == expected_metrics.keys()
        for kind, texts in expected_metrics["perplexity"].items():
            assert metrics["perplexity"][kind] == pytest.approx(texts, rel=1e-3)
        assert not (self.run(name) / "checkpoints").exists()


Whole = Callable[..., str]
