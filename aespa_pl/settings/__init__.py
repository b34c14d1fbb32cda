"""Define every setting of ``aespa-pl``: meaning, unit, range, default and the default's source.

The docstring under a field is its ``--help`` text. Ranges are types, so that a bad value is refused
while the command line is parsed. Settings that a method decides may be null; then
:func:`aespa_pl.resolve.resolved` fills in the method's value.
"""

from dataclasses import dataclass, field, is_dataclass
from typing import Any, Literal, get_type_hints

from jsonargparse.typing import NonNegativeInt, PositiveInt

from aespa_pl.methods import METHODS
from aespa_pl.settings.quantization import (
    GridSettings,
    ObjectiveSettings,
    OptqSettings,
    PolishSettings,
    QuantizationSettings,
    RoundingSettings,
)
from aespa_pl.settings.tuning import BlockTuningSettings, ModelTuningSettings, TuningSettings
from aespa_pl.settings.types import EXPECTED, Bits, FinitePositive, MethodName, RunName, Seed

__all__ = [
    "EXPECTED", "SECTIONS", "Bits", "BlockTuningSettings", "CalibrationSettings", "CompareSettings",
    "DataSettings", "EvaluationSettings", "GridSettings", "MethodName", "ModelSettings",
    "ModelTuningSettings", "ObjectiveSettings", "OptqSettings", "OutputSettings", "PolishSettings",
    "QuantizationSettings", "RoundingSettings", "Seed", "Settings", "TaskSettings", "TuningSettings",
    "keys_of",
]  # fmt: skip


@dataclass(frozen=True)
class ModelSettings:
    """The model that is quantized."""

    pretrained: str
    """Folder of a Hugging Face model, a name on the hub, or one of the small models that come with the
    package: embedded:opt, embedded:bloom, embedded:llama."""
    revision: str | None = None
    """Branch, tag or commit of a model on the hub."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Floating-point type that blocks run in. auto: float32 on the CPU, the type of the
    stored weights on an accelerator. Statistics and rounding are computed in float32, from weights that are
    rounded to this type."""


@dataclass(frozen=True)
class CalibrationSettings:
    """The text that the statistics are taken from."""

    source: dict[str, FinitePositive] | str = "c4"
    """c4, wikitext2 or ptb (from the hub), embedded (comes with the package), or a local file: .json,
    .jsonl, .ndjson or .jl, of which each row is a document, or any other text, which is one document; also
    with .gz. A row has its text in text or sentence, or a conversation in messages, which the model's chat
    template makes a text of. Several texts with the proportions of their segments: {c4: 0.7, code.jsonl:
    0.3}."""
    segments: PositiveInt = 128
    """Number of calibration segments (Section 4.1)."""
    segment_length: PositiveInt | None = 2048
    """Tokens in a segment (Section 4.1); null: as many as the model has positions."""
    pack: bool = False
    """Join documents that are shorter than a segment, in random order, until they are longer than one; off:
    leave them out, as in the paper (OPTQ)."""
    seed: NonNegativeInt = 0
    """Seed of the random choice of segments."""


@dataclass(frozen=True)
class EvaluationSettings:
    """The texts that the perplexity is measured on."""

    texts: list[str] | str | None = field(default_factory=lambda: ["wikitext2", "ptb", "c4"])
    """Any of wikitext2, ptb, c4 (from the hub), embedded, or local files, as a list; one may stand alone.
    Tables name a file without its folder. null or an empty list: no evaluation."""
    segment_length: PositiveInt | None = None
    """Tokens in a segment; null: as many as the model has positions, 2048 at most (Section 4.1)."""
    max_segments: PositiveInt | None = None
    """Evaluate only the first so many segments of each text; null: all of them (c4: 256)."""
    round_to_nearest: bool = True
    """fit, and test with tasks: measure round-to-nearest as well, for comparison; it costs one more pass."""

    @property
    def names(self) -> list[str]:
        """Return the texts as a list."""
        return [self.texts] if isinstance(self.texts, str) else self.texts or []


@dataclass(frozen=True)
class TaskSettings:
    """Zero-shot tasks, by the rules of lm-evaluation-harness (installed with the extra ``eval``)."""

    tasks: list[str] = field(default_factory=list)
    """Names of the harness (arc_easy, hellaswag, mmlu ...), whose data come from the hub, or local task
    files: path/to/task.yaml. The whole model must fit into the device's memory."""
    task_limit: PositiveInt | None = None
    """Items of each task at most, its first ones; null: all of them."""
    task_batch_size: PositiveInt = 8
    """Items that run through the model at once."""
    task_examples: NonNegativeInt = 0
    """Solved examples before each item (few-shot); 0: zero-shot, as in the paper."""
    task_seed: NonNegativeInt = 0
    """Seed of the choice of solved examples and of all that a task draws at random."""
    kld: bool = False
    """Measure on each text how far next-token distributions are from the original's as well: mean KL
    divergence, its 99.9 % quantile, and how often the likeliest token is the same."""


@dataclass(frozen=True)
class CompareSettings:
    """Runs of aespa-pl compare: each method with each bit width and each seed."""

    methods: list[MethodName] = field(default_factory=lambda: list(METHODS))
    """Values of quantization.method; by default all of them."""
    bits: list[Bits] = field(default_factory=lambda: [2, 3, 4])
    """Values of quantization.bits."""
    formats: list[str] = field(default_factory=list)
    """Values of quantization.format, such as Q2_K; where there are some, they take the place of bits."""
    seeds: list[Seed] = field(default_factory=lambda: [0])
    """Values of data.calibration.seed; mean and spread are over them."""


@dataclass(frozen=True)
class DataSettings:
    """Texts, batches, and where hidden states wait."""

    calibration: CalibrationSettings = field(default_factory=CalibrationSettings)
    """Calibration text."""
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    """Held-out text."""
    bos: bool | Literal["auto"] = "auto"
    """Whether the tokenizer's BOS takes the place of the first token of every segment, of calibration and
    evaluation, but for those of a .safetensors file. auto: for models that are not meant to run without it
    (Gemma); other models are measured without, as in the literature."""
    batch_size: PositiveInt | Literal["auto"] = "auto"
    """Segments that run through a block at once; changes memory and speed, and the order of sums. auto: 4 on
    a CPU; on an accelerator as many as have 8192 tokens."""
    hidden_states: Literal["auto", "device", "memory", "disk"] = "auto"
    """Place where hidden states of all segments wait for the next block: in the device's memory, in host
    memory, or in a file in output.folder that is gone with the process. One stream takes segments *
    segment_length * hidden size numbers of model.dtype. auto: the first of them that has room for all
    streams beside what a block needs; on a CPU memory. The result is the same."""
    memory_gb: FinitePositive | None = None
    """Memory of the device, in units of 10^9 bytes, that a block may take; null: what is free at the start.
    Where the statistics need more, H_V is collected for some heads at a time, with one more pass over the
    segments for each group; where the learning needs more, it is done in portions. The result is the same."""
    cache: str | None = None
    """Folder for what later runs need again: tokenized texts, weights read out of pickles, perplexities
    of the original model; null: aespa_pl under $XDG_CACHE_HOME or ~/.cache."""

    @property
    def batch(self) -> int:
        """Return ``batch_size`` as a number."""
        if self.batch_size == "auto":
            raise ValueError("these settings are not resolved: see aespa_pl.planning.budget")
        return int(self.batch_size)


@dataclass(frozen=True)
class OutputSettings:
    """Folders of the results, and checkpoints on the way to them."""

    folder: str = "lightning_logs"
    """Folder of all runs; the one to give to tensorboard --logdir."""
    name: RunName = "aespa"
    """Name of the run. Every run gets a folder NAME/version_N of its own."""
    checkpoint_seconds: FinitePositive | None = 60.0
    """Seconds between two checkpoints of the learning under way; null: none by time. One takes 12 bytes for
    each weight whose rounding is learned, and 16 for each weight of a block that is tuned. End to end it
    takes 16 for each weight of the model where integers move in memory, and little otherwise. The next
    waits at least 20 times the time that one takes."""
    checkpoint_iterations: PositiveInt | None = None
    """Iterations between two checkpoints of the learning under way; null: none by iterations."""
    histograms: list[str] = field(default_factory=list)
    """Projections, such as [q_proj], whose h(B) TensorBoard shows over the iterations; one histogram
    takes milliseconds to a second, so name few. The result is the same."""


@dataclass(frozen=True)
class Settings:
    """Holds our sections of a configuration."""

    model: ModelSettings
    data: DataSettings
    quantization: QuantizationSettings
    output: OutputSettings


SECTIONS: dict[str, type] = get_type_hints(Settings)  # ``trainer`` is Lightning's


def keys_of(section: Any, prefix: str) -> dict[str, Any]:
    """Return the type of each key of a section, by its whole name: ``quantization.grid.zfold``."""
    keys: dict[str, Any] = {}
    for name, kind in get_type_hints(section).items():
        key = f"{prefix}.{name}"
        keys |= keys_of(kind, key) if is_dataclass(kind) else {key: kind}
    return keys
