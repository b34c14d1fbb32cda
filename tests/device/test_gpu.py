"""Whole runs on a GPU, beside the same runs on the CPU: ``pytest --gpu tests/device/test_gpu.py``."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU and --gpu")

DATA = (
    "--data.calibration.source=embedded", "--data.calibration.segments=32",
    "--data.calibration.segment_length=128", "--data.evaluation.texts=[embedded]",
    "--data.evaluation.segment_length=128", "--data.evaluation.round_to_nearest=false",
)  # fmt: skip
RUNS = {
    "aespa": ("--quantization.method=aespa", "--quantization.rounding.iterations=100"),
    "groups": ("--quantization.method=aespa-fast", "--quantization.bits=3", "--quantization.group_size=32"),
    "tuned": ("--quantization.method=aespa-tuned",),
    "streamed": ("--quantization.method=aespa-tuned", "--quantization.tuning.model.blocks=disk"),
    "mixture": ("--quantization.method=aespa-tuned", "--quantization.format=Q4_K_S"),
    "target": ("--quantization.method=aespa-fast", "--quantization.format=auto", "--quantization.target=4.0"),
}
MODELS = {"opt": "aespa", "bloom": "groups"}
"""A run of each family; the LLaMA has all."""
CASES = [("llama", name) for name in RUNS] + list(MODELS.items())


def command(folder: Path, model: str, run: str, accelerator: str) -> list[str]:
    """Return the command of a run that writes to a folder."""
    return [
        *(sys.executable, "-m", "aespa_pl", "fit", f"--model.pretrained=embedded:{model}", *DATA),
        *RUNS[run],
        *(f"--trainer.accelerator={accelerator}", f"--output.folder={folder}", "--output.name=run"),
    ]


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Return the files of the quantized model."""
    return {path.name: path.read_bytes() for path in (folder / "run/version_0/model").glob("*.safetensors")}


def perplexity(folder: Path) -> float:
    """Return what the run has measured of its quantized model."""
    metrics = json.loads((folder / "run/version_0/metrics.json").read_text())
    return float(metrics["perplexity"]["quantized"]["embedded"])


@pytest.mark.parametrize(("model", "run"), CASES)
def test_a_gpu_and_a_cpu_give_models_that_are_as_good(model: str, run: str, tmp_path: Path) -> None:
    folders = {accelerator: tmp_path / accelerator for accelerator in ("gpu", "cpu")}
    for accelerator, folder in folders.items():
        words = command(folder, model, run, accelerator)
        done = subprocess.run(words, text=True, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert perplexity(folders["gpu"]) == pytest.approx(perplexity(folders["cpu"]), rel=0.03)


@pytest.mark.parametrize("run", ["aespa", "tuned", "streamed", "mixture"])
def test_a_killed_run_ends_with_the_same_bytes(run: str, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(command(whole, "llama", run, "gpu"), check=True)
    for block in ("block_000", "block_002"):
        first = [*command(killed, "llama", run, "gpu"), "--ckpt_path=last"]
        with subprocess.Popen(first, start_new_session=True) as process:
            for _ in waiting():
                if any(killed.glob(f"run/version_0/blocks/{block}*")) or process.poll() is not None:
                    break
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    subprocess.run([*command(killed, "llama", run, "gpu"), "--ckpt_path=last"], check=True)
    assert bytes_of(killed) == bytes_of(whole)


def waiting(seconds: float = 120) -> Iterator[None]:
    """Yield every 20 ms; a failure where it takes longer."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(0.02)
    pytest.fail(f"nothing happened in {seconds} s")
