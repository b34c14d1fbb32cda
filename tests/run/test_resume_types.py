"""A run in block types of llama.cpp that was killed goes on, and ends with the same bytes."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.disks import flip
from tests.export.configurations import llama
from tests.forks import Forks
from tests.run.bench import LAST, Bench, check, kill_at_each, results
from tests.walks import save_with_words, shortened

TYPES = (
    "--quantization.format=Q2_K",
    "--quantization.types={embedding: Q3_K, 1.v_proj: IQ4_XS}",
    "--quantization.method=aespa-fast",
    "--quantization.tuning.blocks.enabled=true",
    "--quantization.tuning.blocks.epochs=1",
    "--quantization.tuning.held_back=0.15",
    "--data.calibration.segments=8",
    "--output.checkpoint_iterations=1",
)
MOMENTS = ["blocks/stem.safetensors", "checkpoints/block_001/tuning/step_2.ckpt"]
"""Files that have just appeared when the run is killed, in their order."""


@pytest.fixture(scope="module")
def bench(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("types")
    torch.manual_seed(0)
    config = llama(hidden_size=256, intermediate_size=64, head_dim=16)  # rows of 256 and of 64
    save_with_words(shortened(AutoModelForCausalLM.from_config(config)), folder / "model")
    return Bench(folder, forks)


def test_killed_at_each_of_its_writes_it_goes_on_to_the_same_bytes(bench: Bench) -> None:
    outcome = bench.fit("whole", *TYPES)
    assert outcome.status == 0, outcome.text
    whole = results(bench.run_of("whole"))
    assert "blocks/stem.safetensors" in whole
    kill_at_each(bench, "killed", MOMENTS, *TYPES)
    check(bench, "killed", bench.fit("killed", *LAST, *TYPES), whole)
    flip(bench.run_of("killed") / "blocks/stem.safetensors")
    check(bench, "killed", bench.fit("killed", *LAST, *TYPES), whole)  # embedding and head are made again
