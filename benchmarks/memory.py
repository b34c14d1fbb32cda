"""Measure the peak resident memory of ``aespa-pl fit`` on LLaMA-type models with random weights.

python benchmarks/memory.py --blocks [12,24,48]                       # a narrow model, minutes
python benchmarks/memory.py --hidden 512 --intermediate 256 --blocks [2] --experts 64   # Qwen3-MoE
python benchmarks/memory.py --hidden 2048 --intermediate 5504 --heads 16 --blocks [24]    # 1.3B

Each run is a process of its own; the operating system's maximum for it is printed beside what
``aespa_pl/planning/needs.py`` predicts. The clip search tries 2 ratios instead of 100: that changes
seconds, not memory. ``--baseline true`` adds a process that only parses the command line.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from jsonargparse import auto_cli
from safetensors.torch import save_file
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from aespa_pl.data.texts import EMBEDDED
from aespa_pl.models import family_of
from aespa_pl.models.skeleton import skeleton
from aespa_pl.planning.budget import portions_in_words
from aespa_pl.planning.needs import device_bytes, host_bytes, partition_for
from aespa_pl.planning.shape import Setup, Shape, Work
from aespa_pl.resolve import resolved
from aespa_pl.settings import DataSettings, MethodName, QuantizationSettings

PROGRAM = """
import sys
import aespa_pl.algorithm.grid as grid
grid.CLIP_RATIOS = 2
from aespa_pl.cli import main
main()
"""


def main(
    *,
    hidden: int = 512,
    intermediate: int = 1376,
    heads: int = 8,
    blocks: list[int] | None = None,
    experts: int = 0,
    vocabulary: int = 32_000,
    segments: int = 8,
    length: int = 512,
    iterations: int = 2,
    dtype: str = "bfloat16",
    threads: int = 1,
    memory_gb: float | None = None,
    baseline: bool = True,
    method: MethodName = "aespa",
    options: list[str] | None = None,
) -> None:
    """Make a model for each number of blocks, quantize it, and print the peak.

    Args:
        hidden: Hidden size.
        intermediate: Width of the feed-forward part.
        heads: Query and key/value heads.
        blocks: Numbers of blocks.
        experts: Experts of a block, of which each token has 8; 0: it is dense.
        vocabulary: Rows of the embedding and of the head.
        segments: Calibration segments.
        length: Tokens in each.
        iterations: Of the rounding.
        dtype: Of the weights and of the blocks while they run.
        threads: Threads of torch.
        memory_gb: As data.memory_gb: what does not fit is worked on in portions.
        baseline: Measure a process that does nothing as well.
        method: As quantization.method.
        options: More options of aespa-pl fit.
    """
    if baseline:
        peak, seconds = _run(["fit", "--print_config", "--model.pretrained", "."], threads)
        print(json.dumps({"baseline_gb": peak / 1e9, "seconds": round(seconds)}), flush=True)
    for count in blocks or [12]:
        sizes: dict[str, Any] = {
            "hidden_size": hidden, "intermediate_size": intermediate, "num_attention_heads": heads,
            "num_key_value_heads": heads, "num_hidden_layers": count, "vocab_size": vocabulary,
            "max_position_embeddings": max(length, 512), "dtype": dtype,
        }  # fmt: skip
        config: PreTrainedConfig = LlamaConfig(**sizes)
        if experts:
            config = Qwen3MoeConfig(**sizes, num_experts=experts, moe_intermediate_size=intermediate)
        with tempfile.TemporaryDirectory() as folder:
            _make_model(config, Path(folder) / "model")
            arguments: dict[str, str | int | float] = {
                "model.pretrained": f"{folder}/model",
                "model.dtype": dtype,
                "data.calibration.source": "embedded",
                "data.calibration.segments": segments,
                "data.calibration.segment_length": length,
                "data.evaluation.texts": "[]",
                "data.hidden_states": "disk",
                "data.batch_size": 1,
                "data.cache": f"{folder}/cache",
                "quantization.method": method,
                "quantization.rounding.iterations": iterations,
                "quantization.grid.zfold": "false",
                "output.folder": f"{folder}/runs",
                "trainer.accelerator": "cpu",
                "trainer.logger": "false",
            }
            if memory_gb:
                arguments["data.memory_gb"] = memory_gb
            words = ["fit", *(f"--{key}={value}" for key, value in arguments.items())]
            peak, seconds = _run(words + (options or []), threads)
            shape = Shape.of(AutoConfig.from_pretrained(f"{folder}/model"), family_of(config).layouts(config))
        settings = resolved(QuantizationSettings(method=method))
        work = Work(segments, length, 1, getattr(torch, dtype).itemsize)
        data = DataSettings(hidden_states="disk")
        setup = Setup(shape, work, data, settings, torch.device("cpu"))
        partition = partition_for(setup, 1e9 * memory_gb if memory_gb else math.inf)
        predicted = host_bytes(setup, partition, recompute=False)
        phases = device_bytes(setup, partition, recompute=False)
        row = {
            "hidden": hidden,
            "blocks": count,
            "parameters": shape.blocks * shape.block_weights + shape.stem_weights,
            "peak_gb": round(peak / 1e9, 3),
            "predicted_gb": round(predicted / 1e9, 3),
            "in_portions": portions_in_words(partition, shape),
            "largest_phase": max(phases, key=lambda phase: phases[phase]),
            "seconds": round(seconds),
        }
        print(json.dumps(row), flush=True)


def _run(arguments: list[str], threads: int) -> tuple[int, float]:
    """Return peak bytes and seconds of a process; its failure ends the benchmark."""
    began = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments], env=environment, stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"aespa-pl ended with status {os.waitstatus_to_exitcode(status)}")
    return 1024 * usage.ru_maxrss, time.perf_counter() - began


def _make_model(config: LlamaConfig, folder: Path) -> None:
    """Write random weights shard by shard, so that this process stays small."""
    folder.mkdir(parents=True)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    shards: dict[str, dict[str, torch.Size]] = {}
    for name, parameter in skeleton(config).named_parameters():
        parts = name.split(".")
        shard = parts[2] if parts[1] == "layers" else "stem"
        shards.setdefault(shard, {})[name] = parameter.shape
    where: dict[str, str] = {}
    for number, shapes in enumerate(shards.values()):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        tensors = {
            name: torch.ones(size) if len(size) == 1 else 0.02 * torch.randn(size)
            for name, size in shapes.items()
        }
        save_file(
            {name: tensor.to(config.dtype) for name, tensor in tensors.items()},
            folder / file,
            {"format": "pt"},
        )
        where |= dict.fromkeys(shapes, file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for path in (EMBEDDED / "llama").iterdir():
        if path.name.startswith("tokenizer"):
            (folder / path.name).write_bytes(path.read_bytes())


if __name__ == "__main__":
    auto_cli(main)
