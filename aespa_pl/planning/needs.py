"""Compute from shapes the memory of each phase's hungriest moment, and disk space (benchmarks/memory.py)."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from aespa_pl.algorithm import candidates, optq
from aespa_pl.algorithm.grid import CLIP_RATIOS, MOST_GRIDS
from aespa_pl.calibration.attended import chunks, over_tokens, row_count, stride
from aespa_pl.calibration.end_loss import POSITIONS, segments_of
from aespa_pl.models import streamed
from aespa_pl.models.family import Role
from aespa_pl.planning import tuning
from aespa_pl.planning.partition import WHOLE, Divisible, Partition, learning_portions
from aespa_pl.planning.shape import FLOAT, HALF, Setup, Shape, Work
from aespa_pl.settings import QuantizationSettings

LEARNED_BYTES = 7 * FLOAT + 4
"""Bytes of a weight that is learned: the weight, its base and gain, the rounding variable with gradient and
two moments in float32; its lower integer in int16, nearest and OPTQ integers in uint8."""
FACTORED = 2
"""Number of matrices of a Hessian's size that exist while OPTQ factors it: H in the reversed order of the
columns and its factor."""
KEPT_BYTES = FLOAT + 1
"""Bytes of a weight that is not learned: the weight, and OPTQ's integer."""
OPTQ_BYTES = 5 * FLOAT
"""Bytes of a weight that OPTQ works on: it, visited and in another layout, its error and its integer."""
REFIT_BYTES = 16 * FLOAT
"""The same with a block type, as measured: also what was found before, and the refit's products."""
PROCESS_BYTES = 730_000_000
"""Bytes of Python, torch, lightning and transformers on Linux with CPU torch: 550 MB of memory and 150 MB of
mapped libraries were measured; the rest is for the model's mapped files."""
GRID_BYTES, CHUNK_BYTES = 8 * FLOAT, 3 * FLOAT
"""Bytes of a candidate grid: scale, zero point, loss, what is made of these, copies of those compared. Bytes
of an error that is compared: itself, its square, a product."""
POLISH_BYTES = 11 * FLOAT
"""Bytes of a weight that is polished: integer, error, step, Newton factor, product; copies where some rows
have ended; the integers that are chosen."""
FRAGMENTED = 1.25
"""Memory that a CPU takes for blocks with experts, of that of their tensors: matrices of a MB come from the
heap, whose free pieces do not fit all others, and each number of tokens has programs of its own. 1.06 to 1.27
were measured over the phases of a block with 64 experts."""
CHECKPOINT_BYTES = 3 * FLOAT
"""Bytes in a checkpoint of a weight whose rounding is learned: the rounding variable and two moments. The
checkpoint is there twice while one replaces another."""
WORKSPACE_BYTES = {False: 2 * FLOAT, True: 5 * FLOAT}
"""Bytes that an iteration computes meanwhile, for each weight of the largest projection that is learned. An
accelerator (True) does all of it at once, a CPU most of it in chunks."""


def value_bytes(shape: Shape, settings: QuantizationSettings) -> int:
    """Return the bytes of H_V of one key/value head; 0 where there is none."""
    attended = shape.layout.quantizes_values and settings.objective.value == "attention"
    return FLOAT * shape.hidden**2 if attended else 0


def _of_inputs(shape: Shape, partition: Partition, numbers: Mapping[str, int]) -> int:
    """Return the sum of numbers of each input; of experts, as far as their statistics are in memory."""
    experts = {matrix.input for matrix in shape.matrices if matrix.of_expert}
    at_once = min(1.0, (partition.experts or shape.experts) / max(1, shape.experts))
    return round(sum(number * (at_once if name in experts else 1) for name, number in numbers.items()))


def hessian_bytes(shape: Shape, settings: QuantizationSettings, partition: Partition = WHOLE) -> int:
    """Return the bytes of H of all inputs, H_V of all heads, both but for what is on disk, and all G."""
    layout = shape.layout
    numbers = _of_inputs(shape, partition, {name: columns**2 for name, columns in shape.inputs.items()})
    if shape.attends and settings.objective.couples_scores:
        numbers += (layout.heads + layout.key_value_heads) * layout.head_dim**2
    numbers += shape.coupling_numbers(settings)
    return FLOAT * numbers + _heads(shape, partition) * value_bytes(shape, settings)


def shifts(shape: Shape, settings: QuantizationSettings, partition: Partition = WHOLE) -> int:
    """Return the numbers in shifts of inputs, outputs that join the residual, and V; 0 without correction."""
    if not settings.input_correction:
        return 0
    outputs = {m.input: shape.hidden for m in shape.matrices if m.adds_to_residual}
    each = {name: outputs.get(name, columns) * columns for name, columns in shape.inputs.items()}
    of_values = shape.layout.key_value_heads * shape.layout.head_dim * shape.hidden
    return _of_inputs(shape, partition, each) + (of_values if value_bytes(shape, settings) else 0)


def batch_bytes(shape: Shape, work: Work, settings: QuantizationSettings) -> int:
    """Return the bytes of what a batch needs while its statistics are taken."""
    layout, shares, original = shape.layout, shape.shares, 1 if settings.input_correction else 0
    shared = layout.heads // layout.key_value_heads
    heads = (layout.heads + layout.key_value_heads) * layout.head_dim
    # also what the batch before became in each stream, which stays until this one has run
    activations = (5 + original) * shape.hidden + 3 * shape.widest_input + 2 * shape.beside_hidden
    # also the inputs of the original's groups, its residual streams, and what is added to those of both
    of_all = sum(c for name, c in shape.inputs.items() if shares[name] == 1)
    activations += original * (of_all + 6 * shape.hidden)
    # Not at the same time: an input group in float32, the same with the weights of tokens, both residual
    # streams with what is added to them, their difference with and without weights, and squares;
    in_group = (1 + original) * shape.widest_input + 5 * original * shape.hidden
    if layout.mixture is not None:
        # also all experts' inputs, and while those of one are summed up, what all tokens have: the input, its
        # shift, the streams and their difference; all tokens may be routed to one expert
        routed = sum(shares[name] * c for name, c in shape.inputs.items() if shares[name] < 1)
        activations += int(routed) + shape.hidden
        in_group = max(in_group, (2 + 4 * original) * shape.hidden + 3 * shape.widest_input)
    in_group *= work.tokens
    # queries and keys, X and A X of a value head (or A^T A and its product with X), scores and A of a chunk;
    in_attention = work.tokens * shape.mixed(work.length)
    if value_bytes(shape, settings):
        text = work.segments * work.length
        every = stride(settings.objective.value_tokens, text, work.length, shape.hidden)
        rows = max(row_count(chunk) for chunk in chunks(work.length, every))
        in_attention = work.tokens * (heads + shape.hidden)
        if over_tokens(shared, work.length, shape.hidden, every):
            in_attention += work.tokens * work.length + work.length * shape.hidden
        else:
            in_attention += work.tokens // every * shared * shape.hidden
        in_attention += 3 * original * work.tokens * layout.heads * layout.head_dim
        in_attention += work.batch_size * shared * rows * 2 * work.length
    # scores, scores with the mask, and A, where they are formed for all heads.
    formed = 3 * work.batch_size * layout.heads * work.length**2 if shape.forms_probabilities else 0
    return work.tokens * activations * work.dtype_bytes + FLOAT * max(in_group, in_attention, formed)


def device_bytes(setup: Setup, partition: Partition = WHOLE, *, recompute: bool = True) -> dict[str, int]:
    """Return the bytes on the device by phase, of the blocks that need most; the most is a run's."""
    needs = _block_bytes(setup, partition, recompute=recompute)
    if setup.shape.other is None:
        return needs
    others = _block_bytes(replace(setup, shape=setup.shape.other), partition, recompute=recompute)
    return {phase: max(size, others[phase]) for phase, size in needs.items()}


def _block_bytes(setup: Setup, partition: Partition, *, recompute: bool) -> dict[str, int]:
    shape, work, settings, accelerator = setup.shape, setup.work, setup.quantization, not setup.on_cpu
    stream, weights, tables = work.tokens * shape.stream, shape.weights, shape.table_bytes * (not accelerator)
    # a divergence takes the logits of both models and five tensors more
    logits = streamed.POSITIONS * shape.vocabulary * (work.dtype_bytes + 7 * FLOAT)
    block, hessians = shape.block_weights * work.dtype_bytes, hessian_bytes(shape, settings, partition)
    collected = block + hessians + FLOAT * shifts(shape, settings, partition)
    # matrices on disk are read one at a time, but for those of the heads that are learned together
    afterwards = replace(partition, heads=partition.heads and 1, experts=partition.experts and 1)
    hessians = hessian_bytes(shape, settings, afterwards)
    steady, shifted = block + hessians, FLOAT * shifts(shape, settings, afterwards)
    widest, largest = shape.widest_input**2, max(matrix.size for matrix in shape.matrices)
    coupled = sum(m.size for m in shape.matrices if m.role in (Role.QUERY, Role.KEY))  # together
    # V's Hessians are factored as many at once as a chunk holds
    chunk = max(1, (optq.ACCELERATOR_CHUNK if accelerator else optq.CPU_CHUNK) // shape.hidden**2)
    factored = max(widest, min(_heads(shape, afterwards), chunk) * shape.hidden**2)
    of_end_loss = 0
    if settings.objective.end_loss:
        # the logits of some positions, what their labels are drawn from, and gradients; later, of a segment
        # with gradients, G and one product that is added to it
        of_head = min(work.length, POSITIONS) * shape.vocabulary * (work.dtype_bytes + 4 * FLOAT)
        of_block = block + 2 * FLOAT * shape.coupling_numbers(settings)
        of_block += tuning.activation_bytes(shape, work) * work.length
        of_end_loss = shape.stem_in_memory * work.dtype_bytes + max(of_head, of_block)
    # factor and its copy; shift, solution and its copy; a shift of outputs is there already
    solved = max(2 * m.columns**2 + (2 if m.adds_to_residual else 3) * m.size for m in shape.matrices)
    corrected = steady + shifted + FLOAT * (weights + solved)
    # with G of the end loss a copy of what is polished, G dW H with its product, and two copies of G
    with_g = max((3 * m.size + 2 * m.rows * rows for m, rows in shape.coupled(settings)), default=0)
    polished = POLISH_BYTES * max(largest, coupled) + FLOAT * with_g if settings.polish.enabled else 0
    rounded = (FLOAT + 1) * weights  # with their integers
    learned = sum(m.size for m in shape.learned(settings))  # W' is there from OPTQ until they are learned
    factor, optq_weight = FLOAT * factored, OPTQ_BYTES if settings.format == "uniform" else REFIT_BYTES
    optq_bytes = steady + rounded + FLOAT * learned + max(FACTORED * factor, factor + optq_weight * largest)
    search = _search_bytes(shape, settings, accelerator=accelerator)
    learning = _learning_bytes(shape, settings, partition, accelerator=accelerator)
    needs = {
        "embedding and head": (2 * shape.stem_in_memory + stream) * work.dtype_bytes + logits + tables,
        "statistics": max(collected + batch_bytes(shape, work, settings), of_end_loss),
        "correction": corrected if settings.input_correction else 0,
        "grid": steady + rounded + search if search else 0,
        "OPTQ": optq_bytes if settings.optq.enabled else 0,
        "rounding": block + learning if learned else 0,
        "polish": steady + rounded + polished if polished else 0,
        "tuning of blocks": tuning.block_bytes(shape, work, settings),
        "tuning of the model": tuning.model_bytes(shape, work, settings, recompute=recompute)
        + (0 if accelerator else tuning.streaming_bytes(shape, work, settings)),
    }
    of_heap = 1 if accelerator or shape.layout.mixture is None else FRAGMENTED
    return {phase: round(of_heap * size) for phase, size in needs.items()}


def _learning_bytes(
    shape: Shape, settings: QuantizationSettings, partition: Partition, *, accelerator: bool
) -> int:
    """Return the bytes of the portion of the learning that needs most, beside the block's own."""
    layout, learned = shape.layout, shape.learned(settings)
    apart = partition.heads is not None and value_bytes(shape, settings) > 0  # H_V are on disk
    divisible = [
        Divisible(str(i), layout.heads_of(m.role), m.size, apart and m.role is Role.VALUE)
        for i, m in enumerate(learned)
    ]
    afterwards = replace(partition, heads=partition.heads and 1, experts=partition.experts and 1)
    one = value_bytes(shape, settings) if apart else 0
    most = KEPT_BYTES * shape.weights + hessian_bytes(shape, settings, afterwards)
    later, largest = sum(m.size for m in learned), max(m.size for m in shape.matrices)
    for portion in learning_portions(divisible, partition):
        weights = sum(round(learned[int(p.name)].size * (p.end - p.first) / p.heads) for p in portion)
        values = sum(p.end - p.first for p in portion if divisible[int(p.name)].on_disk)
        hessians = _hessians_of(shape, settings, afterwards, weights) + (values - 1) * one
        if settings.products == "bfloat16":
            hessians += hessians // 2 if accelerator else hessians  # a CPU rounds a copy in float32
        later -= weights
        # beside integers, the weights; of those learned later W', which the learning begins with
        needed = LEARNED_BYTES * weights + KEPT_BYTES * (shape.weights - weights) + FLOAT * later + hessians
        most = max(most, needed + WORKSPACE_BYTES[accelerator] * largest)
    return most


def _hessians_of(shape: Shape, settings: QuantizationSettings, partition: Partition, weights: int) -> int:
    """Return the bytes of Hessians while so many weights are learned at once."""
    one, of_all = (hessian_bytes(shape, settings, p) for p in (partition, replace(partition, experts=None)))
    of_input: Counter[str] = Counter()
    for m in shape.matrices:
        of_input[m.input] += m.size
    most = max(columns**2 / of_input[name] for name, columns in shape.inputs.items())
    return min(of_all, one + round(FLOAT * most * weights))


def _search_bytes(shape: Shape, settings: QuantizationSettings, *, accelerator: bool) -> int:
    """Return the bytes that the search of the largest projection's grids takes."""
    if not settings.grid.search:
        return 0
    rows = max(m.size // (settings.group_size or m.columns) for m in shape.matrices)
    size, columns = max(m.size for m in shape.matrices), shape.widest_input
    chunk = candidates.cpu_chunk(settings.group_size or columns)
    chunk = candidates.ACCELERATOR_CHUNK if accelerator else chunk
    tried = (1 if settings.symmetric else 2) * CLIP_RATIOS
    grids = GRID_BYTES * min(tried * rows, MOST_GRIDS)
    # weights over zeta, and in groups; H times zeta
    return grids + CHUNK_BYTES * chunk + FLOAT * (2 * size + columns**2)


def host_bytes(setup: Setup, partition: Partition = WHOLE, *, recompute: bool = True) -> int:
    """Return the bytes in host memory of all processes of a host."""
    devices, place = setup.devices, setup.data.hidden_states
    device = tuning.streaming_bytes(setup.shape, setup.work, setup.quantization)
    if setup.on_cpu:
        device = max(device_bytes(setup, partition, recompute=recompute).values())
    hidden = 0
    if place == "memory" or (setup.on_cpu and place == "device"):
        work = setup.work.of_device(devices.hosts)
        hidden = hidden_bytes(setup.shape, work, setup.quantization)
    return devices.of_host * (PROCESS_BYTES + device) + hidden


def hidden_bytes(shape: Shape, work: Work, settings: QuantizationSettings) -> int:
    """Return the bytes of the hidden states of all segments, in one to three streams.

    Before, the end loss has those of some segments before each block.
    """
    streams = settings.streams * work.stream_bytes(shape.stream)
    if not settings.objective.end_loss:
        return streams
    some = replace(work, segments=min(work.segments, segments_of(work.length)), batch_size=1)
    return max(streams, (shape.blocks + 1) * some.stream_bytes(shape.stream))


def disk_bytes(setup: Setup, stored_bytes: int, partition: Partition = WHOLE) -> int:
    """Return the bytes that a run has on disk; a weight in the model's files has ``stored_bytes``."""
    shape, settings = setup.shape, setup.quantization
    model, integers = (shape.in_blocks + shape.stem_weights) * stored_bytes, shape.integers
    on_disk = setup.data.hidden_states == "disk"
    hidden = hidden_bytes(shape, setup.work, settings) if on_disk else 0
    values = bool(partition.heads) * shape.layout.key_value_heads * value_bytes(shape, settings)
    if partition.experts:  # little of the statistics is in memory alone
        values = hessian_bytes(shape, settings) + FLOAT * shifts(shape, settings)
    waiting = max(waiting_bytes(shape, settings, stored_bytes).values())
    couplings = HALF * shape.blocks * shape.coupling_numbers(settings)
    return model + integers + waiting + hidden + values + couplings


def waiting_bytes(shape: Shape, settings: QuantizationSettings, stored_bytes: int) -> dict[str, int]:
    """Return the bytes on disk while each part of a run is learned; no two of them are there at once."""
    each = [_waiting_bytes(one, settings, stored_bytes) for one in shape.kinds]
    return {what: max(of_kind[what] for of_kind in each) for what in each[0]}


def _waiting_bytes(shape: Shape, settings: QuantizationSettings, stored_bytes: int) -> dict[str, int]:
    learning, of_model = sum(m.size for m in shape.learned(settings)), settings.tuning.model
    of_block = 2 * CHECKPOINT_BYTES * learning
    if settings.tuning.blocks.enabled:  # beside its checkpoints wait the integers that were learned
        of_block = max(of_block, 2 * tuning.CHECKPOINT_BYTES * shape.weights + learning)
    waiting = {"two checkpoints of a block": of_block}
    replaced, integers = shape.block_weights * stored_bytes + shape.weights, shape.integers
    if of_model.enabled and not of_model.integer_rate:
        waiting["a block that replaces another"] = replaced
    elif of_model.enabled and of_model.blocks == "disk":
        offsets = tuning.OFFSETS_OF_MANY_EPOCHS if of_model.epochs > 2 else tuning.OFFSETS
        waiting["how far integers have moved"] = replaced + offsets * tuning.OFFSET_BYTES * integers
    elif of_model.enabled:
        checkpoints = max(replaced, 2 * tuning.CHECKPOINT_BYTES * integers)
        waiting["two checkpoints of the end-to-end tuning"] = checkpoints + integers
    return waiting


def _heads(shape: Shape, partition: Partition) -> int:
    """Return the key/value heads whose H_V is in memory at once."""
    return min(shape.layout.key_value_heads, partition.heads or shape.layout.key_value_heads)
