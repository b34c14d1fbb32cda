"""A run with two threads that was killed goes on with two, and ends with the same bytes."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from aespa_pl.models.hub import resolve
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


def start(folder: Path, name: str, *more: str) -> subprocess.Popen[str]:
    keys = {
        **KEYS,
        "model.pretrained": folder / "model",
        "data.cache": folder / "cache",
        "output.folder": folder,
        "output.name": name,
    }
    options = [f"--{key}={value}" for key, value in keys.items()]
    return subprocess.Popen(
        [sys.executable, "-m", "aespa_pl", "fit", *options, *more],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors


def test_killed_with_two_threads_it_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    source = resolve("embedded:llama")
    shortened(AutoModelForCausalLM.from_pretrained(source)).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(source).save_pretrained(tmp_path / "model")
    killed, whole = (tmp_path / name / "version_0" for name in ("killed", "whole"))
    with start(tmp_path, "whole") as process:
        until = time.monotonic() + 300
        while not any(whole.glob("checkpoints/block_001/*.ckpt")):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.002)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        shutil.copytree(whole, killed)  # what a kill would leave now
        process.send_signal(signal.SIGCONT)
        finish(process)
    assert len(results(killed)) < len(results(whole))
    finish(start(tmp_path, "killed", *LAST))
    assert results(killed) == results(whole)
