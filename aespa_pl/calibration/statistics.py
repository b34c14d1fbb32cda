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
from dataclasses import dataclass, field

from torch import Tensor

from aespa_pl.calibration.hessian import Hessian
from aespa_pl.storage.batches import Matrices


@dataclass(frozen=True)
class Shifts:
    """Holds the shifts that the correction of earlier blocks' errors needs (docs/correction.md).

    X_fp is the input in the original model. Y is an output with the original weights, and Y_fp the original
    model's. A shift of outputs has their rows, so it is smaller than one of inputs where they are fewer.
    """

    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """``2 E[(X_fp - X) X^T] [d_in, d_in]`` by input whose output is added to nothing."""
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    """``2 E[(Y_fp - Y) X^T] [d, d_in]`` by input whose output is added to the residual stream R:
    ``Y = R + W X``."""
    attended: Tensor | None = None
    """``2 E[(Y_fp - Y) A X^T] [n_kv, d_h, d]`` with a head's attention output ``Y = W X A^T``; the mean over
    the query heads of a value head. None: H_V is not collected."""


@dataclass(frozen=True)
class Reached:
    """Says how much of the text an expert has seen."""

    tokens: int
    """Number of tokens that were routed to it."""
    layer_share: float
    """Share of all tokens' Hessian in its own: above 0 where it has seen fewer tokens than its input has
    columns."""


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

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor that is in memory, with a name for messages."""
        for group, hessian in self.inputs.items():
            yield f"H of {group}", hessian[:]
        named: dict[str, Hessian | Matrices | None]
        named = {"H_V": self.attended, "G_Q": self.g_query, "G_K": self.g_key}
        if self.shifts is not None:
            named |= {f"the shift of {k}": v for k, v in self.shifts.inputs.items()}
            named |= {f"the output's shift of {k}": v for k, v in self.shifts.outputs.items()}
            named["the shift of the attention output"] = self.shifts.attended
        for name, tensor in named.items():
            if isinstance(tensor, Tensor):
                yield name, tensor
            elif tensor is not None:
                for head in range(len(tensor)):
                    yield name, tensor[head : head + 1]
