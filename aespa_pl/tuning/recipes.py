"""Choose what the tuning of a block learns: one parametrization for its weights, and what else is trained."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

from torch import Tensor, nn

from aespa_pl.algorithm.grid_types import TypedWeight
from aespa_pl.algorithm.quantizer import QuantizedWeight, StoredWeight
from aespa_pl.models.family import BlockLayout
from aespa_pl.settings import QuantizationSettings
from aespa_pl.tuning.clipping import Clipped
from aespa_pl.tuning.equivalent import transformations_of
from aespa_pl.tuning.parametrization import FixedIntegers, StraightThrough, WeightParametrization
from aespa_pl.tuning.rounding import RoundingPenalty, UpOrDown
from aespa_pl.tuning.typed import TypedFixedIntegers, TypedStraightThrough

MakeWeight = Callable[[str, StoredWeight, Tensor], WeightParametrization]
"""Makes a layer's parametrization from its path, its quantized weight and the weight that it stands for."""


@dataclass(frozen=True)
class Recipe:
    """Says what is learned of a block."""

    weight: MakeWeight
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


def _everything(_: str, start: StoredWeight, target: Tensor) -> WeightParametrization:
    if isinstance(start, TypedWeight):
        return TypedStraightThrough(start, target)
    return StraightThrough(start, target)


def _scales(_: str, start: StoredWeight, __: Tensor) -> WeightParametrization:
    if isinstance(start, TypedWeight):
        return TypedFixedIntegers(start, start.weight())
    return FixedIntegers(start)


EVERYTHING = Recipe(_everything, learns_vectors=True, learns_steps=True)
"""Recipe that learns integers, scales, norms and biases."""
SCALES = Recipe(_scales, learns_vectors=True)
"""Recipe that learns scales, norms and biases."""


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

            return Recipe(clipped, transforms=transforms)
        case "annealed":
            return replace(EVERYTHING, anneals=True)
        case _:
            return EVERYTHING
