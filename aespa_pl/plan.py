"""What a run will need: memory, disk, arithmetic and time, from the shape of a model alone.

The memory is that of the tensors that exist at once in the hungriest moment of each phase of a block;
``benchmarks/memory.py`` holds it against measured runs.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from aespa_pl.algorithm.adaround import rounding_loss, start
from aespa_pl.algorithm.grid import CLIP_RATIOS, min_max_grid, search_grid
from aespa_pl.algorithm.workspace import Workspace
from aespa_pl.errors import UserError
from aespa_pl.models.checkpoint import skeleton
from aespa_pl.models.family import BlockLayout, Family, Role
from aespa_pl.settings import DataSettings, QuantizationSettings

FLOAT = 4
"""Bytes of a float32."""
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
"""Python, torch, lightning and transformers, before any model: measured on Linux with CPU torch."""
TYPICAL_ZFOLD_ROUNDS = 10
"""Searches of a grid with zeta, for the estimate of the time; the settings allow up to 30."""

MEASURED_WEIGHTS = 2**22
"""Weights of the matrix that rates are measured on."""
MOST_CALLS = 1000
PREFIXES = ("", "K", "M", "G", "T", "P", "E")


@dataclass(frozen=True)
class Matrix:
    """One projection."""

    rows: int
    columns: int
    role: Role
    group: str
    adds_to_residual: bool

    @property
    def size(self) -> int:
        """Number of weights."""
        return self.rows * self.columns

    @property
    def product_flops(self) -> int:
        """Operations of one product of the weights with their Hessian."""
        return 2 * self.size * self.columns


@dataclass(frozen=True)
class Shape:
    """What a model's needs follow from."""

    blocks: int
    block_weights: int
    """Parameters of a block, norms and biases included."""
    stem_weights: int
    matrices: tuple[Matrix, ...]
    layout: BlockLayout

    @classmethod
    def of(cls, config: PreTrainedConfig, family: Family) -> "Shape":
        """Read the shape off a model without weights."""
        model, layout = skeleton(config), family.layout(config)
        block = model.get_submodule(family.blocks_path)[0]
        matrices = []
        for group in layout.groups:
            for p in group.projections:
                rows, columns = block.get_submodule(p.module).weight.shape
                matrices.append(
                    Matrix(rows // p.part[1], columns, p.role, group.name, p.residual is not None)
                )
        everything = sum(parameter.numel() for parameter in model.parameters())
        in_block = sum(parameter.numel() for parameter in block.parameters())
        blocks = int(config.num_hidden_layers)
        return cls(blocks, in_block, everything - blocks * in_block, tuple(matrices), layout)

    @property
    def hidden(self) -> int:
        """Hidden size."""
        return self.matrices[0].columns

    @property
    def weights(self) -> int:
        """Quantized weights of a block."""
        return sum(matrix.size for matrix in self.matrices)

    @property
    def inputs(self) -> dict[str, int]:
        """Columns of each input group."""
        return {matrix.group: matrix.columns for matrix in self.matrices}

    @property
    def widest_input(self) -> int:
        """The largest number of columns."""
        return max(self.inputs.values())


@dataclass(frozen=True)
class Work:
    """How much text, and in what pieces."""

    segments: int
    length: int
    batch_size: int
    dtype_bytes: int

    @property
    def tokens(self) -> int:
        """Tokens of a batch."""
        return self.batch_size * self.length

    def stream_bytes(self, hidden: int) -> int:
        """Hidden states of all segments."""
        return self.segments * self.length * hidden * self.dtype_bytes


def learned(matrix: Matrix, settings: QuantizationSettings) -> bool:
    """Return whether the method learns the rounding of a matrix."""
    if settings.method == "aespa-hybrid":
        return matrix.role is not Role.OTHER
    return settings.method == "aespa"


def hessian_bytes(shape: Shape, settings: QuantizationSettings) -> int:
    """Return the bytes of H for each input group, H_V, G_Q and G_K."""
    layout = shape.layout
    numbers = sum(columns**2 for columns in shape.inputs.values())
    if settings.objective.value == "attention":
        numbers += layout.key_value_heads * shape.hidden**2
    if settings.objective.query_key == "attention":
        numbers += (layout.heads + layout.key_value_heads) * layout.head_dim**2
    return FLOAT * numbers


def shift_bytes(shape: Shape, settings: QuantizationSettings) -> int:
    """Return the bytes of what only the correction of earlier errors needs."""
    if not settings.input_correction:
        return 0
    numbers = sum(columns**2 for columns in shape.inputs.values())
    numbers += sum(shape.hidden * m.columns for m in shape.matrices if m.adds_to_residual)
    if settings.objective.value == "attention":
        numbers += shape.layout.key_value_heads * shape.hidden**2
    return FLOAT * numbers


def device_bytes(shape: Shape, work: Work, settings: QuantizationSettings) -> dict[str, int]:
    """Return the bytes on the device, by phase; the largest is what a run needs."""
    stem = shape.stem_weights * work.dtype_bytes
    block = shape.block_weights * work.dtype_bytes
    hessians, shifts = hessian_bytes(shape, settings), shift_bytes(shape, settings)
    largest = max(matrix.size for matrix in shape.matrices)
    widest = max(columns**2 for columns in shape.inputs.values())
    streams = 2 if settings.input_correction else 1
    shared = shape.layout.heads // shape.layout.key_value_heads
    probabilities = work.batch_size * shape.layout.heads * work.length**2 * FLOAT
    activations = work.tokens * (4 * shape.hidden + 3 * shape.widest_input) * work.dtype_bytes
    float_inputs = work.tokens * max(2 * shape.widest_input, 3 * shared * shape.hidden) * FLOAT
    originals = (streams - 1) * (
        work.tokens * (sum(shape.inputs.values()) + 2 * shape.hidden) * work.dtype_bytes
        + probabilities
    )
    targets = FLOAT * shape.weights if settings.input_correction else 0
    learning = sum(m.size for m in shape.matrices if learned(m, settings))
    kept = shape.weights - learning
    steady = block + hessians
    return {
        "embedding and head": stem + work.tokens * shape.hidden * work.dtype_bytes,
        "statistics": steady + shifts + activations + float_inputs + 3 * probabilities + originals,
        "correction": (steady + shifts + targets + 3 * FLOAT * widest + 2 * FLOAT * largest)
        if settings.input_correction
        else 0,
        "OPTQ": steady
        + (FLOAT + FLOAT + 1) * shape.weights
        + OPTQ_BYTES * largest
        + 5 * FLOAT * widest,
        "rounding": steady
        + LEARNED_BYTES * learning
        + KEPT_BYTES * kept
        + (2 * FLOAT * largest if learning else 0),
    }


def host_bytes(
    shape: Shape, work: Work, settings: QuantizationSettings, *, on_cpu: bool, on_disk: bool
) -> int:
    """Return the bytes in host memory of the whole process.

    Args:
        shape: Of the model.
        work: Calibration text.
        settings: Of the quantization.
        on_cpu: The device is the CPU: its memory is the host's.
        on_disk: Hidden states are kept in files.
    """
    streams = 2 if settings.input_correction else 1
    hidden = 0 if on_disk else streams * work.stream_bytes(shape.hidden)
    device = max(device_bytes(shape, work, settings).values()) if on_cpu else 0
    return PROCESS_BYTES + hidden + device


def disk_bytes(
    shape: Shape, work: Work, settings: QuantizationSettings, *, stored_bytes: int, on_disk: bool
) -> int:
    """Return the bytes that a run leaves or holds on disk.

    Args:
        shape: Of the model.
        work: Calibration text.
        settings: Of the quantization.
        stored_bytes: Of each weight in the checkpoint.
        on_disk: Hidden states are kept in files.
    """
    streams = 2 if settings.input_correction else 1
    model = (shape.blocks * shape.block_weights + shape.stem_weights) * stored_bytes
    integers = shape.blocks * shape.weights
    learning = sum(m.size for m in shape.matrices if learned(m, settings))
    hidden = streams * work.stream_bytes(shape.hidden) if on_disk else 0
    return model + integers + 2 * CHECKPOINT_BYTES * learning + hidden


def block_flops(shape: Shape, work: Work, settings: QuantizationSettings) -> dict[str, float]:
    """Return the floating-point operations of one block, by phase; two for a multiply-add."""
    streams = 2 if settings.input_correction else 1
    tokens, d = work.segments * work.length, shape.hidden
    heads, kv = shape.layout.heads, shape.layout.key_value_heads
    attention = 4 * tokens * work.length * heads * shape.layout.head_dim
    forward = 2 * tokens * shape.weights + attention
    grams = 2 * tokens * sum(columns**2 for columns in shape.inputs.values())
    if settings.objective.value == "attention":
        grams += 2 * tokens * heads * (work.length * d + d**2)
    product = sum(m.product_flops for m in shape.matrices)
    with_zeta = settings.grid.zfold
    searches = 1 + min(TYPICAL_ZFOLD_ROUNDS, settings.grid.max_rounds) if with_zeta else 1
    zero_points = 1 if settings.symmetric else 2
    grid = searches * zero_points * CLIP_RATIOS * product
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
        "statistics": streams * (forward + grams),
        "grid": float(grid),
        "OPTQ": float(product + factors),
        "rounding": float(step * settings.rounding.iterations),
        "polish": float(polish),
    }


@dataclass(frozen=True)
class Rates:
    """Floating-point operations a second of a device, in the program's own code."""

    product: float
    grid: float
    rounding: float

    def seconds(self, flops: dict[str, float]) -> dict[str, float]:
        """Return the seconds of each phase."""
        rate = {"grid": self.grid, "rounding": self.rounding}
        return {phase: count / rate.get(phase, self.product) for phase, count in flops.items()}


def measure_rates(shape: Shape, device: torch.device, *, seconds: float) -> Rates:
    """Measure a device on random matrices of a model's width for about ``seconds``.

    Where a whole matrix would take too long it has fewer rows; a rate hardly depends on them.
    """
    d = shape.hidden
    rows = min(d, max(64, MEASURED_WEIGHTS // d))
    W, X = torch.randn(1, rows, d, device=device), torch.randn(2 * d, d, device=device)
    H = (X.T @ X / len(X))[None]
    flops = 2.0 * W.numel() * d
    product = flops / _median_seconds(lambda: W[0] @ H[0], device, seconds / 3)
    few, zeta = W[:, : max(1, rows // 64)], torch.ones(d, device=device)

    def search() -> object:
        return search_grid(few, H, zeta, bits=2, symmetric=False, group_size=None)

    searched = 2 * CLIP_RATIOS * 2.0 * few.numel() * d
    grid = searched / _median_seconds(search, device, seconds / 3)
    fixed, B = start(W, W, min_max_grid(W, zeta, bits=2, symmetric=False, group_size=None))
    B = torch.nn.Parameter(B)
    adam, workspace = torch.optim.Adam([B], fused=True), Workspace()

    def step() -> None:
        b = B.detach()
        gradient = workspace.like("gradient", b)
        B.grad = gradient
        rounding_loss(
            b, fixed, H, None, weight=1.0, beta=8.0, workspace=workspace, gradient=gradient
        )
        adam.step()

    return Rates(product, grid, flops / _median_seconds(step, device, seconds / 3))


def _median_seconds(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the median of the calls made in ``seconds``, after one that warms up."""
    work()
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while not taken or (time.perf_counter() < end and len(taken) < MOST_CALLS):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return sorted(taken)[len(taken) // 2]


def plan(
    config: PreTrainedConfig,
    family: Family,
    *,
    data: DataSettings,
    quantization: QuantizationSettings,
    device: torch.device,
    dtype: torch.dtype | None,
    seconds: float,
) -> list[tuple[str, str, str]]:
    """Return what a run needs, as rows of a table: what, how much, from what.

    Args:
        config: Of the model; no weights are needed.
        family: Of the model.
        data: Texts.
        quantization: How.
        device: Where.
        dtype: Type that blocks run in; None: float32 on the CPU, that of the configuration elsewhere.
        seconds: For the measurement of the device.

    Raises:
        UserError: The segments have no length.
    """
    shape = Shape.of(config, family)
    stored: torch.dtype = getattr(config, "dtype", None) or torch.float32
    on_cpu, on_disk = device.type == "cpu", data.hidden_states == "disk"
    if dtype is None:
        dtype = torch.float32 if on_cpu else stored
    length = data.calibration.segment_length or family.positions(config)
    if length is None:
        raise UserError(
            "data.calibration.segment_length must be a number: this model has no limit of positions"
        )
    work = Work(data.calibration.segments, length, data.batch_size, dtype.itemsize)
    phases = device_bytes(shape, work, quantization)
    host = host_bytes(shape, work, quantization, on_cpu=on_cpu, on_disk=on_disk)
    disk = disk_bytes(shape, work, quantization, stored_bytes=stored.itemsize, on_disk=on_disk)
    flops = block_flops(shape, work, quantization)
    taken = measure_rates(shape, device, seconds=seconds).seconds(flops)
    parameters = shape.blocks * shape.block_weights + shape.stem_weights
    return [
        (
            "model",
            f"{human(parameters)} parameters",
            f"{shape.blocks} blocks of {human(shape.block_weights)}",
        ),
        ("device memory", f"{human(max(phases.values()))}B", f"{device.type}, one block at a time"),
        *(("", f"{human(count)}B", phase) for phase, count in phases.items() if count),
        (
            "host memory",
            f"{human(host)}B",
            f"hidden states: {human(work.stream_bytes(shape.hidden))}B a stream, {data.hidden_states}"
            + (", and what is the device's" if on_cpu else ""),
        ),
        ("disk", f"{human(disk)}B", "model, integers, two checkpoints of a block"),
        (
            "arithmetic",
            f"{human(shape.blocks * sum(flops.values()))}FLOP",
            f"{human(sum(flops.values()))}FLOP a block",
        ),
        (
            "time",
            duration(shape.blocks * sum(taken.values())),
            "estimate, without evaluation: arithmetic over the rates just measured",
        ),
        *(("", duration(shape.blocks * count), phase) for phase, count in taken.items() if count),
    ]


def human(number: float) -> str:
    """Return a number in powers of a thousand: ``12.3 G``."""
    power = 0 if number < 1 else min(len(PREFIXES) - 1, int(math.log10(number)) // 3)
    return f"{number / 1000**power:.1f} {PREFIXES[power]}"


def duration(seconds: float) -> str:
    """Return seconds in the unit that a person would choose."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
