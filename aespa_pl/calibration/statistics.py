"""Hold the statistics of one block: all that steps 2 to 4 know of the calibration text.

``N`` is the number of calibration tokens, ``X [d, N]`` a projection's inputs and ``A_h [L, L]`` the
attention probabilities of head h. Every statistic is ``2 / N`` times a sum of outer products over all
tokens: that is the Hessian of the squared error, and what the paper's lambda is weighed against.

    H     = 2 E[X X^T]            every projection; projections with the same input share it
    H_V   = 2 E[X A_h^T A_h X^T]  the value projection, a matrix for each key/value head
    G_Q   = 2 E[K_h^T K_h]        the query projection, a matrix for each query head
    G_K   = 2 E[Q_h^T Q_h]        the key projection, a matrix for each key/value head

Source: docs/algorithm.md, step 1; Eq. 17, 21 and 22 of the paper.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from aespa_pl.algorithm.hessian import damp
from aespa_pl.algorithm.massive import token_weights
from aespa_pl.algorithm.objectives import operand
from aespa_pl.algorithm.second_moments import add_gram, bounded
from aespa_pl.calibration.observe import Observation
from aespa_pl.errors import UserError
from aespa_pl.models.family import BlockLayout
from aespa_pl.storage.batches import BatchesOnDisk, Matrices, MatricesOnDisk, NamedMatrices

RIDGE = 0.01
"""Share of a norm's mean squared weight that is added where a residual error is divided by the weight."""


class Hessian:
    """Holds damped Hessians ``[heads, d_in, d_in]``, or one for all; a slice of heads is a tensor in memory.

    Damping changes the diagonal in place, because a copy would take as much memory as the matrices do.
    It always starts from the diagonal of the statistics, so it can be changed again.
    """

    def __init__(self, matrices: Matrices) -> None:
        """Take the matrices over, undamped, wherever they lie."""
        self._matrices = matrices
        heads = (matrices[h : h + 1] for h in range(len(matrices)))
        # copies: a view of each would keep all matrices in memory at once
        self._undamped = torch.cat([head.diagonal(dim1=-2, dim2=-1).clone() for head in heads])
        self._diagonal = self._undamped

    @property
    def in_memory(self) -> bool:
        """Tell whether the matrices of all heads are in memory all the time."""
        return isinstance(self._matrices, Tensor)

    @property
    def dead(self) -> Tensor:
        """Return which inputs are always 0, boolean, ``[heads or 1, d_in]``."""
        return self._undamped == 0

    def damp(self, damping: float) -> None:
        """Add a part of its mean diagonal to the diagonal of each head, in place of any part before."""
        self._diagonal = damp(self._undamped, damping)
        if isinstance(self._matrices, Tensor):
            self._matrices.diagonal(dim1=-2, dim2=-1).copy_(self._diagonal)

    def __len__(self) -> int:
        return len(self._matrices)

    def __getitem__(self, heads: slice) -> Tensor:
        matrices = self._matrices[heads]
        if not self.in_memory:
            matrices.diagonal(dim1=-2, dim2=-1).copy_(self._diagonal[heads])
        return matrices


@dataclass(frozen=True)
class Shifts:
    """Holds the shifts that the correction of earlier blocks' errors needs (docs/correction.md).

    X_fp is the input in the original model. Y is an output with the original weights, and Y_fp the original
    model's. A shift of outputs has their rows, so it is smaller than one of inputs where they are fewer.
    """

    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """``2 E[(X_fp - X) X^T] [d_in, d_in]`` by input whose output is added to nothing."""
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    """``2 E[(Y_fp - Y) X^T] [d, d_in]`` by input with ``Y = R + W X``, added to the residual stream R."""
    attended: Tensor | None = None
    """``2 E[(Y_fp - Y) A X^T] [n_kv, d_h, d]`` with a head's attention output ``Y = W X A^T``; the mean over
    the query heads of a value head. None: H_V is not collected."""


@dataclass(frozen=True)
class Reached:
    """Says how much of the text an expert has seen."""

    tokens: int
    """Number of tokens that were routed to it."""
    layer_share: float
    """Share of all tokens' Hessian in its own: above 0 where it has fewer tokens than its input columns."""


@dataclass(frozen=True)
class BlockStatistics:
    """Holds the statistics of one block, in float32."""

    inputs: Mapping[str, Hessian]
    """``H`` by input of the layout's groups."""
    attended: Hessian | None
    """``H_V``; the mean over the query heads that share a value head. None: not collected."""
    g_query: Tensor | None
    """``G_Q [n_h, d_h, d_h]``, as each query head sees its keys. None: not collected."""
    g_key: Tensor | None
    """``G_K [n_kv, d_h, d_h]``; the mean over the query heads that share a key head."""
    shifts: Shifts | None = None
    """Shifts; None: the original model's stream was not watched, or equals the quantized one (block 0)."""
    tokens: int = 0
    """Number N of calibration tokens."""
    magnitudes: Mapping[str, Tensor] = field(default_factory=dict)
    """``E|x| [d_in]`` by input group; empty: not collected."""
    reached: Mapping[str, Reached] = field(default_factory=dict)
    """What experts have seen, by input."""
    couplings: Mapping[str, Tensor] = field(default_factory=dict)
    """G ``[heads, rows, rows]`` of the end loss, by projection."""

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor with a name for messages; each head of a Hessian by itself."""
        named: dict[str, Hessian | Tensor | None] = {f"H of {k}": v for k, v in self.inputs.items()}
        named |= {"H_V": self.attended, "G_Q": self.g_query, "G_K": self.g_key}
        if self.shifts is not None:
            named |= {f"the shift of {k}": v for k, v in self.shifts.inputs.items()}
            named |= {f"the output's shift of {k}": v for k, v in self.shifts.outputs.items()}
            named["the shift of the attention output"] = self.shifts.attended
        for name, tensor in named.items():
            if isinstance(tensor, Tensor):
                yield name, tensor
            elif tensor is not None:
                yield from ((name, tensor[head : head + 1]) for head in range(len(tensor)))


class DividedStatistics:
    """Joins parts of a block's statistics from several passes; the matrices that are divided wait on disk."""

    def __init__(
        self, layout: BlockLayout, folder: Path, device: torch.device, *, heads: bool, experts: bool
    ) -> None:
        """Begin with nothing in a file of the ``folder``; ``heads`` and ``experts`` say what is divided."""
        self._store, self._device = BatchesOnDisk(folder), device
        self._values = MatricesOnDisk(self._store, device) if heads else None
        inputs = (item for group in layout.groups for item in group.inputs.items())
        self._on_disk = {name for name, (first, *_) in inputs if experts and first.expert is not None}
        self._inputs: dict[str, Hessian] = {}
        self._shifts: tuple[dict[str, Matrices], dict[str, Matrices]] = ({}, {})
        self._parts: list[BlockStatistics] = []

    def add(self, found: BlockStatistics) -> None:
        """Take what a pass has found."""
        inputs = self._kept({name: hessian[:] for name, hessian in found.inputs.items()})
        self._inputs |= {name: Hessian(matrices) for name, matrices in inputs.items()}
        if found.shifts is not None:
            for kept, shifts in zip(self._shifts, (found.shifts.inputs, found.shifts.outputs), strict=True):
                kept.update(self._kept({name: shift[None] for name, shift in shifts.items()}))
            found = replace(found, shifts=Shifts(attended=found.shifts.attended))
        if self._values is not None and found.attended is not None:
            self._values.append(found.attended[:])
            found = replace(found, attended=None)
        self._parts.append(replace(found, inputs={}))

    def joined(self) -> BlockStatistics:
        """Return the statistics of all parts, of which there is one at least."""
        first, parts = self._parts[0], self._parts
        shifts, of_parts = None, [part.shifts for part in parts if part.shifts is not None]
        if of_parts:
            attended = [shift.attended for shift in of_parts if shift.attended is not None]
            inputs, outputs = (NamedMatrices(kept) for kept in self._shifts)
            shifts = Shifts(inputs, outputs, torch.cat(attended) if attended else None)
        return replace(
            first,
            inputs=self._inputs,
            attended=first.attended if self._values is None else Hessian(self._values),
            shifts=shifts,
            magnitudes={name: mean for part in parts for name, mean in part.magnitudes.items()},
            reached={name: reached for part in parts for name, reached in part.reached.items()},
        )

    def _kept(self, matrices: Mapping[str, Tensor]) -> dict[str, Matrices]:
        """Return matrices ``[1, ...]`` of inputs where they are to be."""
        kept: dict[str, Matrices] = {**matrices}
        for name in matrices.keys() & self._on_disk:
            kept[name] = MatricesOnDisk(self._store, self._device).append(matrices[name])
        return kept


class Sums(dict[str, Tensor]):
    """Holds the sums over tokens that the statistics of a block are made of, by name, in float32."""

    INPUT, SHIFT, OUTPUT_SHIFT = "input ", "shift ", "output shift "
    MAGNITUDE, WEIGHT = "magnitude ", "weight "
    """Prefixes of the sums of an input."""

    def of(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """Return the sum of a name; the first time it is zero."""
        if name not in self:
            # blocks run in inference mode, but sums are changed outside of it
            with torch.inference_mode(mode=False):
                self[name] = torch.zeros(shape, dtype=torch.float32, device=like.device)
        return self[name]

    def named(self, prefix: str) -> dict[str, Tensor]:
        """Return the sums of the inputs that have a prefix, by input."""
        return {k.removeprefix(prefix): v for k, v in self.items() if k.startswith(prefix)}

    def add_input(self, name: str, X: Tensor, kind: str, shift: Tensor | None) -> None:
        """Add the products of an input ``X [N, d_in]``, and of a ``kind`` of ``shift [N, rows]`` with it."""
        factor = operand(X)
        add_gram(self.of(self.INPUT + name, X, X.shape[1], X.shape[1]), factor)
        if shift is not None:
            total = self.of(kind + name, X, shift.shape[1], X.shape[1])
            total.addmm_(operand(shift).T, factor)

    def add_weights(self, name: str, root: Tensor) -> None:
        """Add the weights of an input's tokens, of which ``root [N, 1]`` has the roots."""
        self.of(self.WEIGHT + name, root, 1).add_(root.square().sum())

    def take_mean_weights(self) -> None:
        """Divide what was summed up of an input by the mean weight of its tokens; all sums have ``2 / N``."""
        for name, total in self.named(self.WEIGHT).items():
            for kind in (self.INPUT, self.SHIFT, self.OUTPUT_SHIFT):
                if kind + name in self:
                    self[kind + name].mul_(2 / total)

    def add_magnitude(self, name: str, X: Tensor) -> None:
        """Add half the absolute values of ``X``: in the end all sums get ``2 / N``, a mean has ``1 / N``."""
        self.of(self.MAGNITUDE + name, X, X.shape[1]).add_(X.abs().sum(0), alpha=0.5)


def rows(X: Tensor) -> Tensor:
    """Return ``[B, L, d]`` of any type as ``[B * L, d]`` in float32."""
    return X.flatten(0, -2).float()


def refuse_not_finite(values: Tensor, what: str, dtype: torch.dtype) -> None:
    """Raise UserError where values have NaN or infinity; ``what`` begins the message.

    ``dtype`` is the one that blocks run in.
    """
    if bool(torch.isfinite(values).all()):
        return
    name, advice = str(dtype).removeprefix("torch."), "check model.pretrained"
    if dtype != torch.float32:
        advice = "continue with --model.dtype bfloat16, or float32 where that is not enough"
    raise UserError(f"{what} NaN or infinite values, so the model's activations overflow in {name}: {advice}")


def before_norms(
    inverse: Tensor, weight: Tensor, root: Tensor | None, shift: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the roots ``[N, 1]`` of the tokens' weights, and a shift ``[N, d]``, of what norms multiply.

    They are given behind the norms (None: roots of 1; no shift), which multiply each token by its ``inverse
    [B, L, 1]`` and each column by its ``weight [d]``.
    """
    inverse = bounded(inverse, 1).flatten(0, 1)
    root = inverse if root is None else root * inverse
    if shift is None:
        return root, None
    return root, shift * weight / (weight.square() + RIDGE * weight.square().mean())


def output_shift(
    seen: Observation, original: Observation, name: str, shape: torch.Size
) -> tuple[Tensor, Tensor]:
    """Return ``Y_fp - Y [B * L, d]`` of an input, times the roots of the tokens' weights, and these roots.

    The ``shape`` is ``[B, L, d]``: some families flatten the streams that Y is read from.
    """
    streams = (s.residuals[name].float() + s.outputs[name].float() for s in (original, seen))
    target, output = (Y.view(shape) for Y in streams)
    root = token_weights(target, output).sqrt().flatten()[:, None]
    return (target - output).flatten(0, 1) * root, root
