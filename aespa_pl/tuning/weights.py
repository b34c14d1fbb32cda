"""Turn quantized projections into parametrizations of a block's linear layers, as a recipe says, and back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from aespa_pl.algorithm.grid_types import TypedWeight
from aespa_pl.algorithm.quantizer import QuantizedWeight, StoredWeight
from aespa_pl.models.family import BlockLayout, Projection
from aespa_pl.models.weights import projection_rows
from aespa_pl.settings import QuantizationSettings
from aespa_pl.tuning.omniquant import Clipped, transformations_of
from aespa_pl.tuning.parametrization import (
    RoundingPenalty,
    Stored,
    StraightThrough,
    UpOrDown,
    WeightParametrization,
)
from aespa_pl.tuning.typed import TypedStraightThrough

MakeWeight = Callable[[str, StoredWeight, Tensor], WeightParametrization]
"""Makes a layer's parametrization from its path, its quantized weight and the weight that it stands for."""


@dataclass(frozen=True)
class Recipe:
    """Says what is learned of a block."""

    weight: MakeWeight
    learns_latent: bool = True
    """Whether latent values are trained; otherwise they stay."""
    learns_vectors: bool = False
    """Whether norms and biases are trained."""
    learns_steps: bool = False
    """Whether latent values are learned in distances of two integers, whose rate depends on the bits."""
    transforms: Mapping[str, nn.Module] = field(default_factory=dict)
    """Modules that transform norms and biases, by their names, where the weights are transformed."""
    penalty: RoundingPenalty | None = None
    """Penalty that is added to the error."""
    anneals: bool = False
    """Whether latent values are rounded softly, and more and more sharply."""


def _straight_through(_: str, start: StoredWeight, target: Tensor) -> WeightParametrization:
    if isinstance(start, TypedWeight):
        return TypedStraightThrough(start, target)
    return StraightThrough(start, target)


EVERYTHING = Recipe(_straight_through, learns_vectors=True, learns_steps=True)
"""Recipe that learns integers, scales, norms and biases."""
SCALES = Recipe(_straight_through, learns_latent=False, learns_vectors=True)
"""Recipe that learns scales, norms and biases."""


@dataclass(frozen=True)
class TunableBlock:
    """Holds a block of the model with what its weights stand for."""

    block: nn.Module
    """Module with zeta folded and dequantized weights, in float32 and evaluation mode."""
    layout: BlockLayout
    """Projections that are tuned, the block's or some."""
    weights: Mapping[str, StoredWeight]
    """Quantized weights by projection."""
    dtypes: Mapping[str, torch.dtype]
    """Types that the block's parameters are stored in, by their names."""
    targets: dict[str, Tensor] | None = None
    """Weights ``[rows, d_in]`` that the integers were chosen for, with zeta folded, by projection, until the
    training of these begins; None: the quantized weights themselves, so that an integer moves only where many
    mini-batches agree on it."""


def recipe(settings: QuantizationSettings, block: nn.Module, layout: BlockLayout) -> Recipe:
    """Return what the settings, without any null, want to be learned of projections that train together."""
    tuning, rounding = settings.tuning.blocks, settings.rounding
    match tuning.parametrization:
        case "rounding":
            penalty = RoundingPenalty(tuning.penalty, rounding.warmup, rounding.beta_start, rounding.beta_end)
            return Recipe(
                lambda _, start, target: UpOrDown(cast(QuantizedWeight, start), target), penalty=penalty
            )
        case "clipping" | "affine" as kind:
            transforms = transformations_of(
                block, layout, matrices=kind == "affine", epochs=int(tuning.epochs or 0)
            )

            def clipped(path: str, start: StoredWeight, target: Tensor) -> Clipped:
                transform, uniform = transforms.get(f"{path}.weight"), cast(QuantizedWeight, start)
                return Clipped(uniform, target, symmetric=settings.symmetric, transform=transform)

            return Recipe(clipped, learns_latent=False, transforms=transforms)
        case "annealed":
            return replace(EVERYTHING, anneals=True)
        case _:
            return EVERYTHING


def parametrize_block(tunable: TunableBlock, recipe: Recipe) -> None:
    """Parametrize weights of a block, and let its norms and biases be rounded to their stored types.

    All projections of one linear layer become one weight. Parameters that the recipe doesn't learn stay. The
    weights that are aimed at are taken out of ``tunable``, because they are as large as the block.
    """
    block, layout, starts = tunable.block, tunable.layout, tunable.weights
    layers = layers_of(layout)
    transformed = recipe.transforms.keys() - {f"{path}.weight" for path in layers}  # routers among them
    others = (n for n, p in block.named_parameters() if p.dim() == 1 or n in transformed)
    vectors = {name: tunable.dtypes[name] for name in others}
    for path, projections in layers.items():
        layer = cast(nn.Linear, block.get_submodule(path))
        start = merged_weight({p.name: starts[p.name] for p in projections}, layout, projections)
        if tunable.targets is None:
            target = start.weight()
        else:
            target = merged({p.name: tunable.targets.pop(p.name) for p in projections}, layout, projections)
        made = recipe.weight(path, start, target)
        parametrize.register_parametrization(layer, "weight", made)
        _latent(layer).requires_grad_(recipe.learns_latent)
    parametrize_vectors(block, vectors, learned=recipe.learns_vectors, transforms=recipe.transforms)


def parametrize_vectors(
    module: nn.Module,
    dtypes: Mapping[str, torch.dtype],
    *,
    learned: bool = True,
    transforms: Mapping[str, nn.Module] | None = None,
) -> None:
    """Let norms and biases of a block or model, by name, be rounded to the types that they are stored in.

    Modules in ``transforms`` change them before that.
    """
    for name, dtype in dtypes.items():
        path, _, kind = name.rpartition(".")
        owner = module.get_submodule(path)
        owner.get_parameter(kind).requires_grad_(learned)
        if transforms and name in transforms:
            parametrize.register_parametrization(owner, kind, transforms[name])
        if dtype != torch.float32:
            parametrize.register_parametrization(owner, kind, Stored(dtype))


def quantized_weights(block: nn.Module, layout: BlockLayout) -> dict[str, StoredWeight]:
    """Return what the weights of a parametrized block stand for, by projection."""
    weights: dict[str, StoredWeight] = {}
    for path, projections in layers_of(layout).items():
        layer = cast(nn.Linear, block.get_submodule(path))
        made = cast(WeightParametrization, layer.get_submodule("parametrizations.weight.0"))
        whole = made.quantized(_latent(layer).detach())
        order = torch.arange(len(whole.integers))
        weights |= {p.name: whole.rows(projection_rows(order, layout, p).flatten()) for p in projections}
    return weights


def remove_parametrizations(block: nn.Module) -> None:
    """Turn a parametrized block into an ordinary one that computes the same."""
    for module in list(block.modules()):
        if parametrize.is_parametrized(module):
            for name in list(cast(nn.ModuleDict, module.parametrizations)):
                parametrize.remove_parametrizations(module, name)
    block.requires_grad_(requires_grad=False)


def merged(parts: Mapping[str, Tensor], layout: BlockLayout, projections: Sequence[Projection]) -> Tensor:
    """Return the parts ``[rows, ...]`` of all projections of a linear layer, in the order of its rows."""
    first = parts[projections[0].name]
    whole = first.new_empty(sum(len(parts[p.name]) for p in projections), *first.shape[1:])
    for projection in projections:
        rows = projection_rows(whole, layout, projection)  # a view
        rows.copy_(parts[projection.name].view(rows.shape))
    return whole


def merged_weight(
    parts: Mapping[str, StoredWeight], layout: BlockLayout, projections: Sequence[Projection]
) -> StoredWeight:
    """Return the weights of all projections of a linear layer as its one weight."""
    first = parts[projections[0].name]
    numbers = {kind: {n: getattr(q, kind) for n, q in parts.items()} for kind in first.tensors()}
    whole = {kind: merged(each, layout, projections) for kind, each in numbers.items()}
    weight: StoredWeight = replace(first, **whole)  # type: ignore[arg-type]
    return weight


def layers_of(layout: BlockLayout) -> dict[str, list[Projection]]:
    """Return the projections of each linear layer, by its path."""
    layers: dict[str, list[Projection]] = {}
    for projection in layout.projections:
        layers.setdefault(projection.module, []).append(projection)
    return layers


def _latent(layer: nn.Module) -> nn.Parameter:
    return layer.get_parameter("parametrizations.weight.original")
