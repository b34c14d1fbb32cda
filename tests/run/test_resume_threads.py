"""A run with two threads that was killed goes on with two, and ends with the same bytes."""

import signal
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from aespa_pl.models.hub import resolve
from tests.forks import THREADS, Forks
from tests.run.bench import LAST, results
from tests.walks import shortened

KEYS = {
    "data.calibration.source": "embedded",
    "data.calibration.segments": 16,
    "data.calibration.segment_length": 128,
    "data.evaluation.texts": [],
    "quantization.method": "aespa",
    "quantization.rounding.iterations": 10,
    "output.checkpoint_iterations": 5,
    "trainer.accelerator": "cpu",
}
"""Matrices of 128 x 512 and 2048 tokens are large enough that torch divides them between its threads."""


def test_killed_with_two_threads_it_goes_on_to_the_same_bytes(forks: Forks, tmp_path: Path) -> None:
    source = resolve("embedded:llama")
    shortened(AutoModelForCausalLM.from_pretrained(source)).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(source).save_pretrained(tmp_path / "model")
    keys = {
        **KEYS,
        "model.pretrained": tmp_path / "model",
        "data.cache": tmp_path / "cache",
        "output.folder": tmp_path,
    }
    options = [f"--{key}={value}" for key, value in keys.items()]

    def fit(name: str, *more: str, status: int = 0, **how: Any) -> None:
        given = ["fit", *options, f"--output.name={name}", *more]
        outcome = forks.run(given, threads=THREADS, **how)
        assert outcome.status == status, outcome.text

    killed, whole = (tmp_path / name / "version_0" for name in ("killed", "whole"))
    when = f"{killed}/checkpoints/block_001/*.ckpt"
    fit("killed", number=signal.SIGKILL, when=when, status=-signal.SIGKILL)
    fit("whole")
    assert len(results(killed)) < len(results(whole))
    fit("killed", *LAST)
    assert results(killed) == results(whole)
