"""Keep what the tuning of one unit of a block has learned, while the next unit is tuned."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from aespa_pl.algorithm.grid_types import TypedWeight
from aespa_pl.algorithm.quantizer import StoredWeight
from aespa_pl.models.weights import set_projection_weight
from aespa_pl.storage.files import write_tensors
from aespa_pl.tuning import TunableBlock, Tuned
from aespa_pl.walk.record import read_weight, weight_tensors


def write_unit(file: Path, tunable: TunableBlock, found: Tuned) -> None:
    """Write what was learned of a unit: its weights, and the norms and biases of the block."""
    tensors = weight_tensors(found.weights[0])
    tensors |= {f"vector {name}": p for name, p in _vectors(tunable).items()}
    write_tensors(file, tensors | {"finite": torch.tensor(found.finite)}, {})


@torch.no_grad()
def read_unit(file: Path, tunable: TunableBlock) -> tuple[dict[str, StoredWeight], bool]:
    """Put what ``write_unit`` wrote into the block; return weights, and whether all errors were finite."""
    device = next(tunable.block.parameters()).device
    tensors = load_file(file, str(device))
    weights: dict[str, StoredWeight] = {}
    for p in tunable.layout.projections:
        if f"{p.name}.integers" in tensors:
            start = tunable.weights[p.name]
            kind = start.kind.name if isinstance(start, TypedWeight) else None
            weights[p.name] = read_weight(tensors, p.name, start.bits, kind)
            set_projection_weight(tunable.block, tunable.layout, p, weights[p.name].weight())
    for name, parameter in _vectors(tunable).items():
        parameter.copy_(tensors[f"vector {name}"])
    return weights, bool(tensors["finite"])


def _vectors(tunable: TunableBlock) -> dict[str, nn.Parameter]:
    return {name: p for name, p in tunable.block.named_parameters() if p.dim() == 1}
