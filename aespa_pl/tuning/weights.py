"""Turn quantized projections into parametrizations of a block's linear layers, and back."""

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from aespa_pl.models.family import BlockLayout, Projection
from aespa_pl.models.weights import projection_rows
from aespa_pl.tuning.parametrization import QuantizedWeight, Stored, WeightParametrization

MakeParametrization = Callable[[str, QuantizedWeight], WeightParametrization]
"""Makes the parametrization of a linear layer's weight from the layer's path and its quantized weight."""


def parametrize_block(
    block: nn.Module,
    layout: BlockLayout,
    starts: Mapping[str, QuantizedWeight],
    make: MakeParametrization,
    dtypes: Mapping[str, torch.dtype],
    *,
    learns_vectors: bool = True,
    transforms: Mapping[str, nn.Module] | None = None,
) -> None:
    """Parametrize weights of a block, and let its norms and biases be rounded to their stored types.

    Args:
        block: Block in float32, with zeta folded; it is changed in place.
        layout: Projections that are parametrized, the block's or some; all of one linear layer become
            one weight.
        starts: Quantized weights at the start, by projection.
        make: Makes a parametrization, StraightThrough or another.
        dtypes: Types that the parameters are stored in, by name.
        learns_vectors: Whether norms and biases are trained.
        transforms: Modules that transform norms and biases before they are rounded, by name.
    """
    block.requires_grad_(requires_grad=False)
    vectors = [name for name, parameter in block.named_parameters() if parameter.dim() == 1]
    for path, projections in _layers(layout).items():
        layer = cast(nn.Linear, block.get_submodule(path))
        start = QuantizedWeight(
            merged({name: q.integers for name, q in starts.items()}, layout, path),
            merged({name: q.scale for name, q in starts.items()}, layout, path),
            merged({name: q.zero_point for name, q in starts.items()}, layout, path),
            starts[projections[0].name].bits,
        )
        made = make(path, start)
        parametrize.register_parametrization(layer, "weight", made)
        _latent(layer).requires_grad_(made.learns_latent)
    for name in vectors:
        path, _, kind = name.rpartition(".")
        module = block.get_submodule(path)
        module.get_parameter(kind).requires_grad_(learns_vectors)
        if transforms and name in transforms:
            parametrize.register_parametrization(module, kind, transforms[name])
        if dtypes[name] != torch.float32:
            parametrize.register_parametrization(module, kind, Stored(dtypes[name]))


def quantized_weights(block: nn.Module, layout: BlockLayout) -> dict[str, QuantizedWeight]:
    """Return what the weights of a parametrized block stand for, by projection."""
    found = {}
    for path, projections in _layers(layout).items():
        layer = cast(nn.Linear, block.get_submodule(path))
        made = cast(WeightParametrization, layer.get_submodule("parametrizations.weight.0"))
        whole = made.quantized(_latent(layer).detach())
        for p in projections:
            integers, scale, zero_point = (
                projection_rows(tensor, layout, p).flatten(0, 1)
                for tensor in (whole.integers, whole.scale, whole.zero_point)
            )
            found[p.name] = QuantizedWeight(integers, scale, zero_point, whole.bits)
    return found


def remove_parametrizations(block: nn.Module) -> None:
    """Turn a parametrized block into an ordinary one that computes the same."""
    for module in list(block.modules()):
        if parametrize.is_parametrized(module):
            for name in list(cast(nn.ModuleDict, module.parametrizations)):
                parametrize.remove_parametrizations(module, name)
    block.requires_grad_(requires_grad=False)


def merged(parts: Mapping[str, Tensor], layout: BlockLayout, path: str) -> Tensor:
    """Return the rows of all projections of a linear layer, in the order of the layer's rows.

    Args:
        parts: ``[rows, ...]`` by projection.
        layout: The block's projections.
        path: Path of the layer in the block.
    """
    projections = _layers(layout)[path]
    first = parts[projections[0].name]
    whole = first.new_empty(sum(len(parts[p.name]) for p in projections), *first.shape[1:])
    for projection in projections:
        rows = projection_rows(whole, layout, projection)  # a view
        rows.copy_(parts[projection.name].view(rows.shape))
    return whole


def _layers(layout: BlockLayout) -> dict[str, list[Projection]]:
    """Return the projections of each linear layer, by its path."""
    layers: dict[str, list[Projection]] = {}
    for projection in layout.projections:
        layers.setdefault(projection.module, []).append(projection)
    return layers


def _latent(layer: nn.Module) -> nn.Parameter:
    return layer.get_parameter("parametrizations.weight.original")
