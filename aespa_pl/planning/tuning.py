"""Compute the memory of the tuning, of blocks as a whole and of the model end to end."""

from aespa_pl.algorithm.grid_types import TYPES
from aespa_pl.planning.shape import FLOAT, Shape, Work
from aespa_pl.settings import QuantizationSettings

BLOCK_BYTES = {
    **dict.fromkeys(("straight-through", "clipping", "affine"), 6 * FLOAT + 1),
    "annealed": 8 * FLOAT + 1,
    "rounding": 8 * FLOAT + 3,
}
"""Bytes of a weight of a block. In float32: the latent value with gradient, two
moments and best epoch, and the weight of the forward pass; the integer in uint8. Annealed: also the soft
integer and the derivative. Rounding: also h and its derivative, and the lower integer in int16. Clipping and
affine: instead of gradient, moments and best epoch, what autograd keeps of the weights before and behind the
transformation, rounded and clamped."""
MODEL_BYTES = FLOAT + 1
"""Bytes of a weight of a model whose integers stay: ``q - z`` in float32, and the integer in uint8."""
MODEL_BYTES_LEARNED = 5 * FLOAT + 1
"""Bytes per weight of a model whose integers are learned: latent value with gradient, two moments and best
epoch in float32, and the integer in uint8."""
CHECKPOINT_BYTES = 4 * FLOAT
"""Bytes in a checkpoint of a weight whose latent value is learned: the value, two moments and the best epoch.
The checkpoint is there twice while one replaces another."""
MOVING_BYTES = {False: 2 * FLOAT + 2, True: 3 * FLOAT}
"""Bytes of a weight of the block that was read from disk, where its integers move: the latent value, the
gradient, and the offset of the next step; where a mini-batch has more segments than one (True) gradients add
up, so they are there beside the weights of a forward pass."""
OFFSET_BYTES = 2
"""Bytes of an offset from the integer of the start, in float16."""
OFFSETS, OFFSETS_OF_MANY_EPOCHS = 4, 5
"""Offsets on disk of a weight whose integer moves there: of the step under way and the one before, of the
last checkpoint and of the best epoch; from the third epoch on the checkpoint has another best epoch."""
AT_ONCE = 5
"""Tensors of the largest matrix's size on the way from its gradient to what is learned. Where the gradient of
straight-through rounding is computed in parts there is the gradient alone."""
SCALE_BYTES = 6 * FLOAT
"""Bytes of a scale, or of another number that a block type has beside integers: its logarithm with gradient,
two moments and best epoch, and itself; two strengths in place of the logarithm take the same twice."""
LOGITS = 6
"""Tensors of the logits' size at once: both models' logits and log-probabilities, divergence, gradient."""
PASSING = 3
"""Tensors of the size of a mini-batch's hidden states on the device, beside a block that was read from disk:
its input, its output by segment and as a whole; the same of gradients."""


def block_bytes(shape: Shape, work: Work, settings: QuantizationSettings) -> int:
    """Return the bytes that the tuning of a block takes; 0 without it."""
    tuning = settings.tuning.blocks
    if not tuning.enabled:
        return 0
    if shape.other is not None:
        return max(block_bytes(one, work, settings) for one in shape.kinds)
    weights = BLOCK_BYTES[str(tuning.parametrization)] * shape.weights
    weights += max(_scale_bytes(shape, settings, block) for block in range(shape.blocks))
    at_once = 1 if tuning.parametrization == "straight-through" else AT_ONCE
    activations = int(tuning.batch_size) * work.length * activation_bytes(shape, work)
    return weights + activations + at_once * _largest(shape)


def model_bytes(shape: Shape, work: Work, settings: QuantizationSettings, *, recompute: bool) -> int:
    """Return the bytes that the end-to-end tuning takes; 0 without it.

    Blocks that ``recompute`` run once more in the backward pass, which keeps only their inputs. So do blocks
    on disk, of which one is in memory.
    """
    tuning = settings.tuning.model
    if not tuning.enabled:
        return 0
    if shape.other is not None:
        return max(model_bytes(one, work, settings, recompute=recompute) for one in shape.kinds)
    on_disk, tokens = tuning.blocks == "disk", int(tuning.batch_size) * work.length
    running = work.length if on_disk else tokens
    of_weight, in_forward, at_once = MODEL_BYTES, FLOAT, 1
    if tuning.integer_rate and on_disk:  # a gradient, its normalized form and the offset at once
        of_weight, in_forward, at_once = MOVING_BYTES[int(tuning.batch_size) > 1], 0, 3
    elif tuning.integer_rate:
        of_weight = MODEL_BYTES_LEARNED
    of_block = running * activation_bytes(shape, work) + in_forward * shape.weights
    of_blocks = shape.blocks * of_block
    if on_disk or recompute:
        of_blocks = of_block + (PASSING if on_disk else shape.blocks) * FLOAT * tokens * shape.stream
    return (
        (1 if on_disk else shape.blocks) * of_weight * shape.weights
        + sum(_scale_bytes(shape, settings, block) for block in range(shape.blocks))
        + of_blocks
        + (FLOAT + work.dtype_bytes) * shape.stem_weights  # also the original's head
        + LOGITS * FLOAT * running * shape.vocabulary
        + at_once * _largest(shape)
    )


def streaming_bytes(shape: Shape, work: Work, settings: QuantizationSettings) -> int:
    """Return the bytes in host memory beside blocks on disk: inputs, the next block, and offsets of this."""
    tuning = settings.tuning.model
    if not tuning.enabled or tuning.blocks != "disk":
        return 0
    if shape.other is not None:
        return max(streaming_bytes(one, work, settings) for one in shape.kinds)
    inputs = shape.blocks * FLOAT * int(tuning.batch_size) * work.length * shape.stream
    offsets = OFFSET_BYTES if tuning.integer_rate else 0
    return inputs + (offsets + (1 + offsets if shape.blocks > 1 else 0)) * shape.weights


def streamed_bytes(shape: Shape, work: Work, settings: QuantizationSettings) -> float:
    """Return the bytes that the end-to-end tuning of all blocks reads and writes with blocks on disk.

    A pass reads the integers, and the offsets where integers move; a step takes two passes, and writes these.
    """
    tuning, held = settings.tuning.model, float(settings.tuning.held_back)
    if not tuning.enabled or tuning.blocks != "disk":
        return 0.0
    offset = OFFSET_BYTES if tuning.integer_rate else 0
    batches = work.segments / int(tuning.batch_size)
    steps, validated = tuning.epochs * (1 - held) * batches, (tuning.epochs + 1) * held * batches
    return float(shape.integers * (steps * (2 * (1 + offset) + offset) + validated * (1 + offset)))


def recomputes(shape: Shape, work: Work, settings: QuantizationSettings, free: float) -> bool:
    """Return whether blocks run once more in the end-to-end tuning, which else takes over ``free`` bytes."""
    return model_bytes(shape, work, settings, recompute=False) > free


def activation_bytes(shape: Shape, work: Work) -> int:
    """Return the bytes for each token of what a block keeps for the backward pass."""
    mixture = shape.layout.mixture
    # a dense network beside experts has norms of its own, and so has the router
    of_norms = 16 if mixture is not None and mixture.input_norm is not None else 6
    numbers = sum(m.share * (m.rows + m.columns) for m in shape.matrices) + of_norms * shape.hidden
    numbers += shape.mixed(work.length) + 2 * shape.beside_hidden
    if shape.forms_probabilities:
        numbers += 3 * shape.layout.heads * work.length
    return int(FLOAT * numbers)


def _scale_bytes(shape: Shape, settings: QuantizationSettings, block: int) -> int:
    numbers = 0.0
    for name, m in shape.of_blocks[block].items():
        kind = settings.type_for(block, name)
        each = 1 / (settings.group_size or m.columns) if kind is None else TYPES[kind].stored_numbers
        numbers += m.size * each
    clipped = settings.tuning.blocks.parametrization in ("clipping", "affine")
    return round((2 if clipped else 1) * SCALE_BYTES * numbers)


def _largest(shape: Shape) -> int:
    """Return the bytes of a tensor of the largest matrix's size."""
    return FLOAT * max(m.size for m in shape.matrices)
