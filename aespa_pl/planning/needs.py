"""Memory, disk and arithmetic from shapes.

The memory is that of the tensors that exist at once in the hungriest moment of each phase of a block;
``benchmarks/memory.py`` holds it against measured runs.
"""

import math
from dataclasses import replace

from aespa_pl.algorithm.candidates import products_of_a_search
from aespa_pl.algorithm.grid import CLIP_RATIOS
from aespa_pl.algorithm.second_moments import computed_share
from aespa_pl.calibration.attention_weighted import chunk_rows
from aespa_pl.models.family import Role
from aespa_pl.planning import tuning
from aespa_pl.planning.partition import WHOLE, Partition
from aespa_pl.planning.shape import FLOAT, Matrix, Shape, Work
from aespa_pl.settings import QuantizationSettings

LEARNED_BYTES = 7 * FLOAT + 4
"""For each weight that is learned: the weight, its base and gain, the rounding variable with gradient and
two moments in float32; its lower integer in int16, nearest and OPTQ integers in uint8."""
KEPT_BYTES = FLOAT + 1
"""For each weight that is not learned: the weight, and OPTQ's integer."""
OPTQ_BYTES = 5 * FLOAT
"""For each weight of the projection that OPTQ works on: pending and visited weights, steps, zero points,
integers."""
CHECKPOINT_BYTES = 3 * FLOAT
"""For each learned weight: the rounding variable and two moments; twice while one replaces another."""
PROCESS_BYTES = 600_000_000
"""Python, torch, lightning and transformers: 380 MB were measured on Linux with CPU torch
(benchmarks/memory.py), the rest is room for the allocator and the libraries' own buffers."""
MOST_PARTS = 64
"""Of the learning of a block; the largest projections then are parts of their own in any case."""
TYPICAL_ZFOLD_ROUNDS = 10
"""Searches of a grid with zeta, for the estimate of the time; the settings allow up to 30."""


def learned(matrix: Matrix, settings: QuantizationSettings) -> bool:
    """Return whether the method learns the rounding of a matrix."""
    return settings.learns(attention=matrix.role is not Role.OTHER)


def value_bytes(shape: Shape, settings: QuantizationSettings) -> int:
    """Return the bytes of H_V of one key/value head; 0 where the objective has none."""
    return FLOAT * shape.hidden**2 if settings.objective.value == "attention" else 0


def hessian_bytes(
    shape: Shape, settings: QuantizationSettings, partition: Partition = WHOLE
) -> int:
    """Return the bytes of H for each input group, H_V of the heads at once, G_Q and G_K."""
    layout = shape.layout
    numbers = sum(columns**2 for columns in shape.inputs.values())
    if settings.objective.query_key == "attention":
        numbers += (layout.heads + layout.key_value_heads) * layout.head_dim**2
    return FLOAT * numbers + _heads(shape, partition) * value_bytes(shape, settings)


def shift_bytes(shape: Shape, settings: QuantizationSettings, partition: Partition = WHOLE) -> int:
    """Return the bytes of what only the correction of earlier errors needs."""
    if not settings.input_correction:
        return 0
    numbers = sum(columns**2 for columns in shape.inputs.values())
    numbers += sum(shape.hidden * m.columns for m in shape.matrices if m.adds_to_residual)
    return FLOAT * numbers + _heads(shape, partition) * value_bytes(shape, settings)


def batch_bytes(shape: Shape, work: Work, settings: QuantizationSettings) -> int:
    """Return the bytes of what a batch needs while its statistics are taken."""
    layout, original = shape.layout, 1 if settings.input_correction else 0
    shared = layout.heads // layout.key_value_heads
    heads = (layout.heads + layout.key_value_heads) * layout.head_dim
    # also the next batch of each stream, which a GPU is sent ahead of its use
    activations = (5 + original) * shape.hidden + 3 * shape.widest_input
    activations += original * (sum(shape.inputs.values()) + 2 * shape.hidden)
    # Not at the same time: an input group in float32, with its original and their difference;
    in_group = work.tokens * (1 + 2 * original) * shape.widest_input
    # queries and keys, X and A X of a value head, and for a chunk of it scores, A and A X;
    in_attention = formed = 0
    if settings.objective.value == "attention":
        rows = min(work.length, chunk_rows(work.length))
        in_attention = (1 + original) * work.tokens * (heads + (1 + shared) * shape.hidden)
        in_attention += work.batch_size * shared * rows * (2 * work.length + shape.hidden)
    # scores, scores with the mask, and A, where they are formed for all heads.
    if shape.forms_probabilities:
        formed = 3 * work.batch_size * layout.heads * work.length**2
    return work.tokens * activations * work.dtype_bytes + FLOAT * max(
        in_group, in_attention, formed
    )


def device_bytes(
    shape: Shape, work: Work, settings: QuantizationSettings, partition: Partition = WHOLE
) -> dict[str, int]:
    """Return the bytes on the device, by phase; the largest is what a run needs."""
    stem = shape.stem_weights * work.dtype_bytes
    block = shape.block_weights * work.dtype_bytes
    hessians = hessian_bytes(shape, settings, partition)
    shifts = shift_bytes(shape, settings, partition)
    largest = max(matrix.size for matrix in shape.matrices)
    widest = max(columns**2 for columns in shape.inputs.values())
    targets = FLOAT * shape.weights if settings.input_correction else 0
    learning = sum(m.size for m in shape.matrices if learned(m, settings))
    at_once = min(learning, partition.weights or learning)
    waiting = learning - at_once
    kept = shape.weights - at_once
    steady = block + hessians
    operands = hessians // 2 if settings.products == "bfloat16" else 0
    return {
        "embedding and head": stem + work.tokens * shape.hidden * work.dtype_bytes,
        "statistics": steady + shifts + batch_bytes(shape, work, settings),
        "correction": (steady + shifts + targets + 3 * FLOAT * widest + 2 * FLOAT * largest)
        if settings.input_correction
        else 0,
        "OPTQ": steady
        + (FLOAT + FLOAT + 1) * shape.weights
        + OPTQ_BYTES * largest
        + 5 * FLOAT * widest,
        "rounding": steady
        + operands
        + LEARNED_BYTES * at_once
        + KEPT_BYTES * kept
        + FLOAT * waiting  # W', which the learning begins with
        + (2 * FLOAT * largest if learning else 0),
        "tuning of blocks": tuning.block_bytes(shape, work, settings),
        "tuning of the model": tuning.model_bytes(shape, work, settings, recompute=True),
    }


def partition_for(
    shape: Shape, work: Work, settings: QuantizationSettings, free: float
) -> Partition:
    """Return what of a block is worked on at once, so that its needs are at most ``free`` bytes.

    As much as possible: fewer heads mean more passes over the segments, fewer weights more Trainers. Where
    nothing is small enough, the passes are those that save nine tenths of what can be saved.
    """

    def most(partition: Partition, *phases: str) -> int:
        needs = device_bytes(shape, work, settings, partition)
        return max(needs[phase] for phase in phases)

    heads, chosen = shape.layout.key_value_heads, WHOLE
    if settings.objective.value == "attention":
        phases = ("statistics", "correction", "OPTQ")
        least = most(Partition(heads=1), *phases)
        limit = max(free, least + 0.1 * (most(WHOLE, *phases) - least))
        for passes in range(1, heads + 1):
            chosen = Partition(None if passes == 1 else math.ceil(heads / passes))
            if most(chosen, *phases) <= limit:
                break
    learning = sum(m.size for m in shape.matrices if learned(m, settings))
    for parts in range(1, MOST_PARTS + 1):
        smaller = replace(chosen, weights=None if parts == 1 else math.ceil(learning / parts))
        if not learning or most(smaller, "rounding") <= free:
            return smaller
    return smaller


def host_bytes(
    shape: Shape,
    work: Work,
    settings: QuantizationSettings,
    *,
    on_cpu: bool,
    on_disk: bool,
    partition: Partition = WHOLE,
) -> int:
    """Return the bytes in host memory of the whole process.

    Args:
        shape: Of the model.
        work: Calibration text.
        settings: Of the quantization.
        on_cpu: The device is the CPU: its memory is the host's.
        on_disk: Hidden states are kept in files.
        partition: What of a block is in memory at once.
    """
    hidden = 0 if on_disk else hidden_bytes(shape, work, settings)
    device = max(device_bytes(shape, work, settings, partition).values()) if on_cpu else 0
    return PROCESS_BYTES + hidden + device


def hidden_bytes(shape: Shape, work: Work, settings: QuantizationSettings) -> int:
    """Return the bytes of the hidden states of all segments, in one stream or two."""
    return (2 if settings.two_streams else 1) * work.stream_bytes(shape.hidden)


def disk_bytes(
    shape: Shape,
    work: Work,
    settings: QuantizationSettings,
    *,
    stored_bytes: int,
    on_disk: bool,
    partition: Partition = WHOLE,
) -> int:
    """Return the bytes that a run leaves or holds on disk.

    Args:
        shape: Of the model.
        work: Calibration text.
        settings: Of the quantization.
        stored_bytes: Of each weight in the checkpoint.
        on_disk: Hidden states are kept in files.
        partition: What of a block is in memory at once; the rest is on disk.
    """
    model = (shape.blocks * shape.block_weights + shape.stem_weights) * stored_bytes
    integers = shape.blocks * shape.weights
    learning = sum(m.size for m in shape.matrices if learned(m, settings))
    hidden = hidden_bytes(shape, work, settings) if on_disk else 0
    values = 0
    if partition.heads:
        values = shape.layout.key_value_heads * value_bytes(shape, settings)
        values *= 2 if settings.input_correction else 1
    checkpoints = 2 * CHECKPOINT_BYTES * learning
    if settings.tuning.blocks.enabled:  # beside its checkpoints wait the integers that were learned
        tuned = 2 * tuning.CHECKPOINT_BYTES * shape.weights + learning
        checkpoints = max(checkpoints, tuned)
    if settings.tuning.model.enabled:
        waiting = shape.block_weights * stored_bytes + shape.weights  # to replace a block
        if settings.tuning.model.integer_rate:
            learned_integers = shape.blocks * shape.weights
            waiting = max(waiting, 2 * tuning.CHECKPOINT_BYTES * learned_integers)
            waiting += learned_integers
        checkpoints = max(checkpoints, waiting)
    return model + integers + checkpoints + hidden + values


def block_flops(
    shape: Shape, work: Work, settings: QuantizationSettings, partition: Partition = WHOLE
) -> dict[str, float]:
    """Return the floating-point operations of one block, by phase; two for a multiply-add."""
    streams = 2 if settings.two_streams else 1
    tokens, d = work.segments * work.length, shape.hidden
    kv = shape.layout.key_value_heads
    attention = 4 * tokens * work.length * shape.layout.heads * shape.layout.head_dim
    forward = 2 * tokens * shape.weights + attention
    statistics = streams * len(partition.head_groups(kv)) * forward + gram_flops(
        shape, work, settings
    )
    product = sum(m.product_flops for m in shape.matrices)
    with_zeta = settings.grid.zfold
    searches = 1 + min(TYPICAL_ZFOLD_ROUNDS, settings.grid.max_rounds) if with_zeta else 1
    searches = searches if settings.grid.search else 0
    zero_points = 1 if settings.symmetric else 2
    candidates = zero_points * CLIP_RATIOS
    grid = searches * sum(
        products_of_a_search(min(m.columns, settings.group_size or m.columns), candidates)
        * m.product_flops
        for m in shape.matrices
    )
    factors = sum(3 * columns**3 for columns in shape.inputs.values()) + 3 * kv * d**3
    step = sum(m.product_flops for m in shape.matrices if learned(m, settings))
    step += sum(
        2 * m.size * shape.layout.head_dim
        for m in shape.matrices
        if learned(m, settings) and m.role in (Role.QUERY, Role.KEY)
    )
    polish = settings.polish.passes * product if settings.polish.enabled else 0
    return {
        "forward": forward,
        "statistics": statistics,
        "grid": float(grid),
        "OPTQ": float(product + factors) if settings.optq.enabled else 0.0,
        "rounding": float(step * settings.rounding.iterations),
        "polish": float(polish),
        **tuning.tuning_flops(shape, work, settings, forward),
    }


def gram_flops(shape: Shape, work: Work, settings: QuantizationSettings) -> float:
    """Return the operations of the statistics of a block, without its forward passes."""
    layout, d = shape.layout, shape.hidden
    originals = 1 if settings.input_correction else 0
    products = sum(computed_share(c) * c**2 for c in shape.inputs.values())
    products += originals * sum(c**2 for c in shape.inputs.values())
    products += originals * sum(d * m.columns for m in shape.matrices if m.adds_to_residual)
    if settings.objective.value == "attention":
        # of the columns of A, those that are not behind a chunk's last row
        columns = min(work.length, (work.length + chunk_rows(work.length)) / 2)
        attended = (1 + originals) * columns * (layout.head_dim + d)
        products += layout.heads * (attended + (computed_share(d) + originals) * d**2)
    if settings.objective.query_key == "attention":
        products += (layout.heads + layout.key_value_heads) * layout.head_dim**2
    return 2.0 * work.segments * work.length * products


def _heads(shape: Shape, partition: Partition) -> int:
    """Return the key/value heads whose H_V is in memory at once."""
    return min(shape.layout.key_value_heads, partition.heads or shape.layout.key_value_heads)
