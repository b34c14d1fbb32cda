"""Each of several devices computes and sends what the program divides, at assumed rates."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import LlamaConfig, OPTConfig, PreTrainedConfig

from aespa_pl.models import family_of
from aespa_pl.planning.arithmetic import TYPICAL_ZFOLD_ROUNDS, learned
from aespa_pl.planning.division import device_flops
from aespa_pl.planning.needs import device_bytes, hessian_bytes, shift_bytes
from aespa_pl.planning.shape import Shape, Work
from aespa_pl.resolve import resolved
from aespa_pl.settings import QuantizationSettings

DEVICES = (1, 2, 4, 8, 16, 32, 64)
CALLS_AN_ITERATION = 3
"""Number of calls: Lightning's two broadcasts, of SIGTERM and of the time for a checkpoint, and our own."""
RECORDED_PRODUCTS = 5
"""Number of products for the losses of whole projections that each process computes for itself: two to keep
the better rounding, three for the journal."""


@dataclass(frozen=True)
class Assumed:
    """Holds the numbers that a prediction rests on."""

    tflops: float
    gigabytes: float
    call_seconds: float


def curve(name: str, config: PreTrainedConfig, assumed: Assumed) -> Iterator[dict[str, Any]]:
    """Yield what is predicted of a model on each number of devices."""
    # learns the rounding, without tunings
    settings = resolved(QuantizationSettings(method="aespa"))
    shape = Shape.of(config, family_of(config))
    work = Work(segments=128, length=2048, batch_size=1, dtype_bytes=2)
    alone = 0.0
    for count in DEVICES:
        flops = _flops(shape, work, settings, count)
        sent = _bytes(shape, settings, count)
        computing = flops / (1e12 * assumed.tflops)
        calls = settings.rounding.iterations * CALLS_AN_ITERATION if count > 1 else 0
        talking = sent / (1e9 * assumed.gigabytes) + calls * assumed.call_seconds
        seconds = shape.blocks * (computing + talking)
        alone = alone or seconds
        yield {
            "kind": "predicted",
            "model": name,
            "devices": count,
            "tflops": assumed.tflops,
            "gigabytes": assumed.gigabytes,
            "call_seconds": assumed.call_seconds,
            "seconds": seconds,
            "speed_up": alone / seconds,
            "communication_seconds": shape.blocks * talking,
            "bytes": shape.blocks * sent,
            "device_bytes": max(device_bytes(shape, work, settings).values()),
        }


def _flops(shape: Shape, work: Work, settings: QuantizationSettings, count: int) -> float:
    """Return the operations of one block on the device that has most to do."""
    total = sum(device_flops(shape, work, settings, count).values())
    product = sum(m.product_flops for m in shape.matrices)
    total += RECORDED_PRODUCTS * product
    if settings.input_correction:  # every process does all of it
        total += product + sum(2 * m.size * m.columns for m in shape.matrices)
        total += sum(columns**3 for columns in shape.inputs.values()) / 3
        total += shape.layout.key_value_heads * shape.hidden**3 / 3
    return total


def _bytes(shape: Shape, settings: QuantizationSettings, count: int) -> float:
    """Return what a process sends for one block, without checkpoints."""
    rows = sum(m.rows for m in shape.matrices)
    searches = 1 + TYPICAL_ZFOLD_ROUNDS
    learning = sum(m.size for m in shape.matrices if learned(m, settings))
    sums = hessian_bytes(shape, settings) + shift_bytes(shape, settings)
    gathered = searches * 8 * rows  # scales and zero points
    gathered += 5 * shape.weights  # OPTQ's weights and integers
    gathered += learning + shape.weights  # integers, learned and after the descent
    return float((2 * sums + gathered) * (count - 1) / count)


def llama_30b() -> PreTrainedConfig:
    """Return the shape of LLaMA-30B."""
    return LlamaConfig(
        hidden_size=6656, intermediate_size=17920, num_attention_heads=52, num_hidden_layers=60,
        num_key_value_heads=52, vocab_size=32_000, max_position_embeddings=2048,
    )  # fmt: skip


def opt_175b() -> PreTrainedConfig:
    """Return the shape of the OPT model with 175 billion weights."""
    return OPTConfig(
        hidden_size=12288, ffn_dim=49152, num_attention_heads=96, num_hidden_layers=96,
        word_embed_proj_dim=12288, vocab_size=50272, max_position_embeddings=2048,
    )  # fmt: skip
