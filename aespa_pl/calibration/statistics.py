"""The statistics of one block, as a value."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from aespa_pl.storage.head_matrices import HeadsOnDisk


@dataclass(frozen=True)
class BlockStatisticTensors:
    """The statistics of one block, in float32; not damped before ``state_problem``."""

    inputs: Mapping[str, Tensor]
    """``H = E[X X^T] [d_in, d_in]`` for each input group of the layout, by its name."""
    attended: Tensor | HeadsOnDisk | None
    """``H_V = E[X A^T A X^T] [n_kv, d, d]``; the mean over the query heads that share a value head."""
    keys: Tensor | None
    """``G_Q = E[K^T K] [n_h, d_h, d_h]``, as each query projection's head sees it."""
    queries: Tensor | None
    """``G_K = E[Q^T Q] [n_kv, d_h, d_h]``; the mean over the query heads that share a key head."""
    shifts: Mapping[str, Tensor] = field(default_factory=dict)
    """``E[(X_fp - X) X^T] [d_in, d_in]`` for each input group, X_fp being the input in the original
    model; empty where it was not watched."""
    attended_shift: Tensor | HeadsOnDisk | None = None
    """``E[(X_fp A_fp^T - X A^T) A X^T] [n_kv, d, d]``, A_fp being the probabilities in the original
    model; the mean over the query heads that share a value head."""
    residual_shifts: Mapping[str, Tensor] = field(default_factory=dict)
    """``E[(R_fp - R) X^T] [d, d_in]`` for each input group whose output is added to the residual stream,
    R; R_fp is that of the original model."""
    diagonals: dict[str, Tensor] = field(default_factory=dict)
    """Of the Hessians as they were before ``state_problem`` damped them, by group; of H_V under its name."""

    def without_shifts(self) -> "BlockStatisticTensors":
        """Return the same without what only the correction needs."""
        return replace(self, shifts={}, attended_shift=None, residual_shifts={})
