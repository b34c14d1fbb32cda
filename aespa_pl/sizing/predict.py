"""Predict how much each candidate of each matrix raises the loss at the end of the model."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from aespa_pl.algorithm.end_loss import predicted, uncompensated
from aespa_pl.calibration.end_loss import LENGTH, SEGMENTS, TIED_DAMPING, Seen, end_loss
from aespa_pl.models.streamed import StreamedModel
from aespa_pl.settings import QuantizationSettings
from aespa_pl.sizing.matrices import SizedMatrix, form_of

ROWS = 256
"""Rows of a matrix that are rounded for the prediction; they stand for all."""
SEED = 0
"""Seed of the labels."""

Losses = dict[str, dict[str, float]]
"""Rise of the end loss in nats per token, by key of a matrix and by candidate."""


def predicted_losses(
    source: StreamedModel,
    tokens: Tensor,
    matrices: Sequence[SizedMatrix],
    settings: QuantizationSettings,
    after: Callable[[], None] = lambda: None,
) -> Losses:
    """Return the predicted rise of the end loss of each candidate.

    Args:
        source: The original model.
        tokens: Calibration segments ``[segments, L]``, of which a few are used.
        matrices: Matrices with their candidates.
        settings: Groups and symmetry of uniform grids, and the damping.
        after: Called after each projection.
    """
    candidates = {key: m.costs for m in matrices for key in m.keys}
    tied = "head" not in candidates
    losses: Losses = {key: dict.fromkeys(of, 0.0) for key, of in candidates.items()}
    columns: list[tuple[Tensor | None, Tensor]] = []  # of the input group under way
    for seen in end_loss(source, tokens[:SEGMENTS, :LENGTH], seed=SEED):
        key = seen.name if seen.block is None else f"{seen.block}.{seen.name}"
        key = "embedding" if key == "head" and tied else key
        if key in losses:
            if not columns or columns[0][0] is not seen.inputs:
                share = TIED_DAMPING if seen.block is None and tied else settings.damping
                columns = [(seen.inputs, _columns(seen, share))]
            for candidate in candidates[key]:
                losses[key][candidate] += _predicted(seen, columns[0][1], candidate, settings)
        after()
    return losses


def of_matrices(matrices: Sequence[SizedMatrix], losses: Losses) -> list[Mapping[str, float]]:
    """Return the losses of each matrix by candidate; those of the projections in it are added up."""
    return [{c: sum(losses[key][c] for key in m.keys) for c in m.costs} for m in matrices]


def _columns(seen: Seen, damping: float) -> Tensor:
    """Return the weight of each column; an embedding is rounded without compensation."""
    if seen.inputs is None:
        return torch.ones(seen.weight.shape[1], device=seen.weight.device)
    return uncompensated(seen.inputs, damping)


def _predicted(seen: Seen, D: Tensor, candidate: str, settings: QuantizationSettings) -> float:
    gradients = seen.gradients if seen.gradients.dim() > 1 else seen.gradients[:, None]
    return predicted(seen.weight, gradients, D, form_of(candidate, settings), ROWS)
