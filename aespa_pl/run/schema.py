"""Define the JSON files of a run; they are validated here and nowhere else."""

from pathlib import Path, PurePosixPath
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from aespa_pl.algorithm.grid_types import TYPES

DESCRIPTION = "quantization.json"  # file in the folder of a quantized model that says how it was made
FORMAT = 2  # of the journal
PHASES = (
    "statistics", "correction", "grid", "optq", "rounding", "polish", "tuning", "writing", "forward",
    "tuning the model",
)  # fmt: skip
"""Phases whose seconds the journal has, of each block and at the end of the model, in their order."""


class Strict(BaseModel):
    """Refuses values of another type, and numbers that are not finite."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or not path.parts:
        raise ValueError(f"{name!r} is no file in the folder of the run")
    return name


FileName = Annotated[str, AfterValidator(_inside)]
"""Path in the folder of a run, which may be somebody else's: it leads to no file elsewhere."""


class TuningRecord(Strict):
    """Holds what a tuning found on the segments that were held back."""

    start_error: int | float | None  # None, here and below: not a finite number
    error: int | float | None  # of the epoch that was kept
    epoch: int  # number of the one that was kept; 0: what the tuning started from
    changed: int | float  # share of the integers
    finite: bool  # whether all errors were finite numbers; the tuning ended where one was not


class TunedModelRecord(TuningRecord):
    """Describes the end-to-end tuning, once it is done."""

    file: FileName  # what was learned; blocks are rewritten from it one by one
    checksum: str
    moved: dict[FileName, str] = {}  # SHA-256 of the files that tell how far integers have moved on disk
    seconds: dict[str, int | float] = {}  # by phase; empty where the run was killed right after


class BlockRecord(Strict):
    """Describes a block that is complete."""

    losses: dict[str, dict[str, int | float]]  # by projection, with damping and other numbers
    seconds: dict[str, int | float]  # by phase
    files: dict[FileName, str]  # SHA-256 of each file
    tuning: TuningRecord | None = None  # of the block as a whole, where there was one
    end_to_end: bool = False  # whether the files hold what the end-to-end tuning learned
    output_error: dict[str, int | float] = {}
    """Squared error of the block's output relative to the original model's, by stage (``rounded``); empty
    where the run had no stream of the original model, or was stopped right after the block."""
    peak_bytes: dict[str, int] = {}  # most memory of the process until then, on ``host`` and ``device``


class LearnedFile(Strict):
    """Names a file that the learning of the block under way has left."""

    block: int
    key: str = ""  # name of the training; only the same one can go on with the file
    file: FileName
    checksum: str
    step: int = 0  # optimizer steps of a checkpoint


class JournalContent(Strict):
    """Defines journal.json."""

    format: int = Field(ge=FORMAT, le=FORMAT)
    fingerprint: dict[str, Any]
    blocks: dict[int, BlockRecord]
    checkpoint: LearnedFile | None
    portions: list[LearnedFile]
    damping: dict[int, int | float]
    tuned: TunedModelRecord | None = None
    stem: str = ""  # SHA-256 of the numbers of embedding and head, where they have block types
    model: dict[FileName, str]  # SHA-256 of the model folder's other files, once all are written


class Metrics(Strict):
    """Defines metrics.json."""

    perplexity: dict[str, dict[str, int | float]]
    seconds: dict[str, int | float]
    peak_bytes: dict[str, int]
    size: dict[str, "_Size"] = {}
    divergence: dict[str, dict[str, "_Distance"]] = {}
    tokens: dict[str, str] = {}


Number = Annotated[int | float, Field(ge=0, lt=1e100)]  # others are damage: ratios of these are finite
Perplexity = Annotated[int | float, Field(gt=0, lt=1e100)]


class _Accuracy(Strict):
    metric: str | None = None
    value: Number
    error: Number | None = None
    items: int | None = None


class _Distance(Strict):
    mean: Number
    rare: Number
    same_top: Number


class _Size(Strict):
    bytes: Number
    bits_per_weight: Number | None = None


class Measured(Strict):
    """Defines what is shown of metrics.json and test.json: by kind of model, then by text or task."""

    perplexity: dict[str, dict[str, Perplexity]] = {}
    divergence: dict[str, dict[str, _Distance]] = {}
    tasks: dict[str, dict[str, _Accuracy]] = {}
    size: dict[str, _Size] = {}
    test_seconds: dict[str, Number] = {}
    seconds: dict[str, Number] = {}
    peak_bytes: dict[str, Number] = {}
    tokens: dict[str, str] = {}
    """What tells the segments of each text from others; files of older versions don't have it."""


class ShownDescription(Strict):
    """Defines what is shown of quantization.json."""

    versions: dict[str, Any] = {}


def _width(chosen: str) -> str:
    """Return a block type or a number of bits, if it is one."""
    if chosen not in TYPES and not chosen.isdecimal():
        raise ValueError("expected a block type, or bits")
    return chosen


class StoredMixture(Strict):
    """Defines mixture.json: what was chosen for a size, and what is predicted of it."""

    chosen: dict[Annotated[str, Field(pattern=r"^(\d+\.)?\w+$")], Annotated[str, AfterValidator(_width)]]
    """Block type, or bits, by ``BLOCK.PROJECTION``, ``embedding`` and ``head``."""
    predicted: Number  # KL divergence from the original, in nats per token
    bytes: int  # of the whole file
    curve: Annotated[list[tuple[int, Number]], Field(min_length=1)]
    """Sizes of the whole file with the least predicted divergence of each."""
    others: dict[str, tuple[int, Number]]  # the same of llama.cpp's mixtures, by name


Content = TypeVar("Content", bound=Strict)


def parse(kind: type[Content], path: Path) -> Content:
    """Read a JSON file. Raises OSError, or DamagedFileError, whose message says which key, not which file."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(key) for key in first["loc"])
        raise DamagedFileError(f"{where}: {first['msg']}" if where else first["msg"]) from error


class DamagedFileError(Exception):
    """Says that a file of a run is missing, or not what the run says of it."""
