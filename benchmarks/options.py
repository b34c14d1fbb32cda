"""Define the options that benchmarks share, and act on them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jsonargparse import set_parsing_settings
from report import Report
from shapes import Problem, problems

set_parsing_settings(docstring_parse_attribute_docstrings=True)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Says how a benchmark measures.

    ``auto_cli`` makes options of the fields of a subclass. It would make subcommands of methods, so there
    are none.
    """

    model: str = "opt-125m"
    """One of SHAPES."""
    repeats: int = 5
    """Number of calls that the median is taken of, after one that warms up."""
    threads: int = 1
    """Number of torch's threads."""
    device: str = "cpu"
    """Device that is measured."""
    output: Path | None = None
    """File that JSON lines are appended to."""


@dataclass(frozen=True, kw_only=True)
class ProjectionOptions(Options):
    """Says the same for a benchmark of the projections of a block."""

    rows: int | None = None
    """Largest number of rows of each matrix (whole heads); null: all."""


def begin(options: Options, columns: Sequence[str], **constants: Any) -> Report:
    """Set threads and seed, and print the head of the table; constants are in each JSON line."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    constants |= {"model": options.model, "threads": options.threads, "device": options.device}
    return Report(columns, options.output, **constants)


def projections(options: ProjectionOptions) -> Iterator[Problem]:
    """Yield the projections of the block."""
    return problems(options.model, options.rows, torch.device(options.device))
