"""Describe the shape of a model and of its calibration text: all that its needs follow from."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedConfig

from aespa_pl.calibration.moments import MOST_ROWS
from aespa_pl.models import family_of
from aespa_pl.models.block_kinds import LINEAR, attention_kinds
from aespa_pl.models.family import BlockLayout, Role
from aespa_pl.models.headers import skeleton
from aespa_pl.models.weights import projection_weight
from aespa_pl.settings import DataSettings, QuantizationSettings

FLOAT, HALF = 4, 2
"""Bytes of a float32, and of a float16."""
TABLE_BYTES = 4
"""Bytes of a weight of a table that is written: its integer twice, or once and the weight in 16 bits."""
LINEAR_ATTENTION = 8
"""Numbers that linear attention keeps for a token and a row of its first projections; 7.7 were measured for
Gated DeltaNet in chunks with a backward pass, and 5.7 to 7.4 without."""
SCANNED = 3, 6, 7
"""Numbers that the scan of Mamba 2 has at once for a token: so many for a row of the input projection, for a
head and position of a chunk, and for a head and number of its state. In transformers without GPU kernels
forward and backward pass took 95 to 97 % of the sum, and a forward pass 72 to 83 %, in whole chunks."""
LATENT = 10
"""Numbers that latent attention has at once for a token and a row of its queries: 7.1 were measured in a
forward pass, and 9.1 to 9.5 with a backward pass."""
CONVOLVED = 2
"""Numbers that a short convolution keeps for a token and a channel: what is convolved, and what comes out."""


@dataclass(frozen=True)
class Matrix:
    """Describes one projection."""

    rows: int
    columns: int
    role: Role
    group: str
    input: str
    """Name of the input whose Hessian it has."""
    adds_to_residual: bool
    """Whether the output is added to the residual stream, behind norms if there are some."""
    share: float = 1.0
    """Share of the tokens that it sees: the mean over the experts, of a shared expert 1."""
    of_expert: bool = False

    @property
    def size(self) -> int:
        """Return the number of weights."""
        return self.rows * self.columns


@dataclass(frozen=True)
class Shape:
    """Holds the sizes of a model that its needs follow from."""

    blocks: int
    block_weights: int
    """Number of parameters of the largest block with H_V, or else with attention, with norms and biases."""
    in_blocks: int
    """Number of parameters of all blocks."""
    stem_weights: int
    matrices: tuple[Matrix, ...]
    """Projections of this block; time is computed as if all blocks were of its kind."""
    layout: BlockLayout
    forms_probabilities: bool
    """Whether the model's own attention has the probabilities of all heads in memory."""
    vocabulary: int
    of_blocks: tuple[Mapping[str, Matrix], ...]
    """Projections of each block that are quantized, by name."""
    hidden: int
    stream: int
    """Columns of a stream before the first block: hidden states, and what a family has behind them."""
    tables: Mapping[str, tuple[int, int]]
    """Rows and columns of the embeddings beside that of the hidden states, by name."""
    kind: str
    """What the largest block has for attention (``models/block_kinds.py``)."""
    scan: tuple[int, int, int] | None = None
    """Heads, positions of a chunk and numbers of a state of Mamba 2; None: there is none."""
    other: "Shape | None" = None
    """The same with the largest of the others; None: there are no others."""

    @classmethod
    def of(cls, config: PreTrainedConfig, layouts: Sequence[BlockLayout]) -> "Shape":
        """Read the shape off a model without weights, given the layout of each block."""
        model, family = skeleton(config), family_of(config)
        blocks = list(cast(nn.Module, model.get_submodule(family.blocks_path)).children())
        of_blocks = tuple(map(_matrices, blocks, layouts))
        everything, *in_blocks = (sum(p.numel() for p in m.parameters()) for m in (model, *blocks))
        quantized = [sum(matrix.size for matrix in of_block.values()) for of_block in of_blocks]
        hidden = projection_weight(blocks[0], layouts[0], layouts[0].groups[0].projections[0]).shape[1]
        forms, vocab = family.forms_probabilities(config), int(config.vocab_size)
        others = family.other_embeddings(config).items()
        sizes = {name: model.get_parameter(f"{path}.weight").shape for name, path in others}
        tables = {name: (rows, columns) for name, (rows, columns) in sizes.items()}
        found: Shape | None = None
        leading = [layout.quantizes_values for layout in layouts]  # these have H_V
        if not any(leading):
            leading = [layout.attended_group is not None for layout in layouts]
        for leads in (False, True):
            kind = [i for i, of_block in enumerate(leading) if of_block == leads]
            kind = [i for i in kind if quantized[i] or not any(quantized)]  # the kept take little
            if not kind:
                continue
            i = max(kind, key=lambda block: (quantized[block], in_blocks[block]))
            found = cls(
                blocks=len(blocks),
                block_weights=in_blocks[i],
                in_blocks=sum(in_blocks),
                stem_weights=everything - sum(in_blocks),
                matrices=tuple(of_blocks[i].values()),
                layout=layouts[i],
                forms_probabilities=forms,
                vocabulary=vocab,
                of_blocks=of_blocks,
                hidden=hidden,
                stream=family.stream_width(config) - int(config.hidden_size) + hidden,
                tables=tables,
                kind=attention_kinds(config)[i],
                scan=_scan(config),
                other=found,
            )
        return cast(Shape, found)

    @property
    def beside_hidden(self) -> int:
        """Return the columns of a stream behind the hidden states."""
        return self.stream - self.hidden

    @property
    def stem_in_memory(self) -> int:
        """Return the number of weights outside the blocks but for ``tables``, which are read from disk."""
        return self.stem_weights - sum(rows * columns for rows, columns in self.tables.values())

    @property
    def table_bytes(self) -> int:
        """Return the bytes that ``tables`` have in host memory while they are quantized and written."""
        return TABLE_BYTES * (self.stem_weights - self.stem_in_memory)

    @property
    def attends(self) -> bool:
        """Tell whether the block has attention."""
        return self.layout.attended_group is not None

    @property
    def kinds(self) -> "list[Shape]":
        """Return the shape of each kind of block, as if all blocks were of it."""
        return [replace(self, other=None), *([] if self.other is None else [self.other])]

    @property
    def integers(self) -> int:
        """Return the number of quantized weights of all blocks."""
        return sum(matrix.size for block in self.of_blocks for matrix in block.values())

    def mixed(self, length: int) -> int:
        """Return the numbers of a token that what stands in the place of attention has at once; 0 with it.

        The segments have a ``length``: Mamba 2 fills the last chunk up.
        """
        if self.attends:
            return 0
        if self.layout.latent:
            return LATENT * self.layout.heads * self.layout.head_dim
        first = self.layout.groups[0].name
        rows = sum(matrix.rows for matrix in self.matrices if matrix.group == first)
        if self.scan is not None:
            heads, chunk, state = self.scan
            of_row, of_place, of_number = SCANNED
            filled = math.ceil(length / chunk) * chunk / length
            return of_row * rows + round(filled * heads * (of_place * chunk + of_number * state))
        return LINEAR_ATTENTION * rows if self.kind == LINEAR else CONVOLVED * self.hidden

    @property
    def weights(self) -> int:
        """Return the number of quantized weights of a block."""
        return sum(matrix.size for matrix in self.matrices)

    @property
    def inputs(self) -> dict[str, int]:
        """Return the number of columns of each input."""
        return {matrix.input: matrix.columns for matrix in self.matrices}

    @property
    def shares(self) -> dict[str, float]:
        """Return the share of the tokens that each input has."""
        return {matrix.input: matrix.share for matrix in self.matrices}

    def learned(self, settings: QuantizationSettings) -> list[Matrix]:
        """Return the projections of a block whose rounding the method learns."""
        return [m for m in self.matrices if settings.learns(attention=m.role is not Role.OTHER)]

    def coupled(self, settings: QuantizationSettings) -> list[tuple[Matrix, int]]:
        """Return the projections of a block with a G of the end loss, and the rows of a head of each."""
        if not settings.objective.end_loss:
            return []
        heads = ((m, m.rows // self.layout.heads_of(m.role)) for m in self.matrices)
        return [(m, n) for m, n in heads if m.role is not Role.VALUE and not m.of_expert and n <= MOST_ROWS]

    def coupling_numbers(self, settings: QuantizationSettings) -> int:
        """Return the numbers in all G of the end loss of a block."""
        return sum(m.rows * rows for m, rows in self.coupled(settings))

    @property
    def experts(self) -> int:
        """Return the number of experts of the block, with a shared one."""
        return 0 if self.layout.mixture is None else self.layout.mixture.total

    @property
    def widest_input(self) -> int:
        """Return the largest number of columns."""
        return max(self.inputs.values(), default=0)


def _scan(config: PreTrainedConfig) -> tuple[int, int, int] | None:
    if not hasattr(config, "mamba_d_state"):
        return None
    return config.mamba_n_heads, config.mamba_chunk_size, config.mamba_d_state


def _matrices(block: nn.Module, layout: BlockLayout) -> dict[str, Matrix]:
    matrices, mixture = {}, layout.mixture
    inputs = ((g.name, name, p) for g in layout.groups for name, ps in g.inputs.items() for p in ps)
    for group, name, p in inputs:
        if not p.kept:
            rows, columns = projection_weight(block, layout, p).shape
            share = 1.0 if p.expert is None or mixture is None else mixture.share(p.expert)
            adds, of_expert = p.residual is not None, p.expert is not None
            matrices[p.name] = Matrix(rows, columns, p.role, group, name, adds, share, of_expert)
    return matrices


@dataclass(frozen=True)
class Work:
    """Says how much text there is, and in what pieces."""

    segments: int
    length: int
    batch_size: int
    dtype_bytes: int

    @property
    def tokens(self) -> int:
        """Return the number of tokens in a batch."""
        return self.batch_size * self.length

    def of_device(self, devices: int) -> "Work":
        """Return the work of the device that gets most of it: segments are divided in whole batches."""
        batches = math.ceil(math.ceil(self.segments / self.batch_size) / devices)
        return replace(self, segments=min(self.segments, batches * self.batch_size))

    def stream_bytes(self, columns: int) -> int:
        """Return the bytes of a stream of all segments."""
        return self.segments * self.length * columns * self.dtype_bytes


@dataclass(frozen=True)
class Devices:
    """Says how many devices a run has, on how many hosts (docs/devices.md)."""

    count: int = 1
    hosts: int = 1

    @property
    def of_host(self) -> int:
        """Return the number of devices of a host."""
        return math.ceil(self.count / self.hosts)


ONE_DEVICE = Devices()


@dataclass(frozen=True)
class Setup:
    """Holds all that the needs of a run follow from."""

    shape: Shape
    work: Work
    data: DataSettings
    quantization: QuantizationSettings
    device: torch.device
    """Device that blocks run on."""
    devices: Devices = ONE_DEVICE

    @property
    def on_cpu(self) -> bool:
        """Return whether the device's memory is the host's."""
        return self.device.type == "cpu"
