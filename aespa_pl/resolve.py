"""Fill in, from the method, the settings that the user leaves at null."""

from collections import Counter
from dataclasses import replace
from typing import Literal, TypeVar

from aespa_pl.errors import UserError
from aespa_pl.methods import METHODS
from aespa_pl.methods.method import Parametrization
from aespa_pl.settings import QuantizationSettings

T = TypeVar("T")
Products = Literal["auto", "float32", "tf32", "bfloat16"]
RATE_WIDTH, LEAST_SHARE = 192, 0.2
"""Hidden size up to which two learning rates hold, and the share of them that is left at five times that and
more: of integers in the tuning of blocks, and of scales end to end (docs/tuning.md)."""
BLOCK_RATES: dict[Parametrization, tuple[float, float]] = {
    "straight-through": (0.005, 0.003),  # at 2 bits, up to RATE_WIDTH
    "rounding": (0.02, 0.003),
    "clipping": (0.005, 0.01),
    "affine": (0.005, 0.01),
}
"""Learning rates of integers and of scales in the tuning of blocks, by what is learned of a weight."""
TYPE_SCALE_RATE = 0.001
"""Learning rate of the scales of block types in the tuning of blocks: few weights share one."""
MODEL_INTEGER_RATE, MODEL_SCALE_RATE = 0.02, 0.003
"""Learning rates of the end-to-end tuning at 2 bits."""


def resolved(
    settings: QuantizationSettings, device: str = "cpu", width: int = RATE_WIDTH
) -> QuantizationSettings:
    """Return the settings with every null that the method decides filled in, and without auto.

    Settings that are resolved already come back unchanged.

    Args:
        settings: Settings of the user.
        device: Type of the device that blocks run on.
        width: Hidden size of the model.

    Raises:
        UserError: The method is unknown, or settings contradict each other.
    """
    if settings.format != "uniform":
        _refuse_with_types(settings)
        settings = replace(settings, bits=_usual_bits(settings), bits_of={})
    method = METHODS.get(settings.method)
    if method is None:
        known = ", ".join(METHODS)
        raise UserError(f"quantization.method is {settings.method}: expected one of {known}")
    grid, objective, rounding = settings.grid, settings.objective, settings.rounding
    blocks, model = settings.tuning.blocks, settings.tuning.model
    parametrization = _either(blocks.parametrization, method.parametrization)
    integer_rate, scale_rate = _block_rates(parametrization, settings.bits, width)
    if settings.format != "uniform":
        scale_rate = TYPE_SCALE_RATE
    error = _share(settings.bits) ** 2  # rounding's error beside that at 2 bits, of the same range
    found = replace(
        settings,
        products=_products(settings.products, device),
        input_correction=_either(settings.input_correction, method.input_correction),
        grid=replace(
            grid,
            search=_either(grid.search, method.search),
            zfold=_either(grid.zfold, method.zfold),
            awq=_either(grid.awq, method.awq),
        ),
        optq=replace(
            settings.optq,
            enabled=_either(settings.optq.enabled, method.optq),
            rows=_either(settings.optq.rows, method.optq_rows),
        ),
        objective=replace(
            objective,
            query_key=_either(objective.query_key, method.query_key),
            value=_either(objective.value, method.value),
        ),
        rounding=replace(
            rounding,
            learn=_either(rounding.learn, method.learn),
            keep_best=_either(rounding.keep_best, method.keep_best),
        ),
        polish=replace(settings.polish, enabled=_either(settings.polish.enabled, method.polish)),
        tuning=replace(
            settings.tuning,
            blocks=replace(
                blocks,
                enabled=_either(blocks.enabled, method.tune_blocks),
                parametrization=parametrization,
                unit=_either(blocks.unit, method.unit),
                epochs=_either(blocks.epochs, method.epochs),
                integer_rate=_either(blocks.integer_rate, integer_rate),
                scale_rate=_either(blocks.scale_rate, scale_rate),
            ),
            model=replace(
                model,
                enabled=_either(model.enabled, method.tune_model),
                integer_rate=_either(model.integer_rate, MODEL_INTEGER_RATE * error),
                scale_rate=_either(model.scale_rate, MODEL_SCALE_RATE * min(error, _narrow(width))),
            ),
        ),
    )
    _refuse_contradictions(found)
    return found


def _usual_bits(settings: QuantizationSettings) -> int:
    """Return the bits of most projections, for which learning rates are; without types the format's."""
    bits = Counter(int(kind[1]) for key, kind in settings.types.items() if "." in key)
    return bits.most_common(1)[0][0] if bits else int(settings.format[1])


def _refuse_with_types(settings: QuantizationSettings) -> None:
    """Refuse what block types of GGUF don't go with.

    Raises:
        UserError: A parametrization is of uniform grids.
    """
    method = METHODS.get(settings.method)
    given = settings.tuning.blocks.parametrization
    learned = _either(given, "straight-through" if method is None else method.parametrization)
    if learned != "straight-through":
        raise UserError(
            f"quantization.format is {settings.format}, which quantization.tuning.blocks.parametrization "
            f"{learned} (method {settings.method}) can't learn: choose straight-through, or another method"
        )


def _refuse_contradictions(settings: QuantizationSettings) -> None:
    grid = settings.grid
    if grid.zfold and not grid.search:
        raise UserError(
            f"quantization.grid.zfold is true and quantization.grid.search is false (method "
            f"{settings.method}): zeta is fitted by the search, so switch both on or both off"
        )
    if grid.exhaustive and not grid.search:
        raise UserError(
            f"quantization.grid.exhaustive is true and quantization.grid.search is false (method "
            f"{settings.method}): nothing is searched, so switch both on or both off"
        )
    if grid.awq and not grid.search:
        raise UserError(
            f"quantization.grid.awq is true and quantization.grid.search is false (method "
            f"{settings.method}): the clip is searched after zeta is found, so switch both on or both off"
        )
    if grid.awq and grid.zfold:
        raise UserError(
            f"quantization.grid.awq and quantization.grid.zfold are both true (method {settings.method}): "
            "both find zeta, so choose one of them"
        )
    tuning = settings.tuning.blocks
    steps = {
        "grid.search": grid.search,
        "optq.enabled": settings.optq.enabled,
        "rounding.learn": settings.rounding.learn != "none",
        "polish.enabled": settings.polish.enabled,
    }
    in_vain = [f"quantization.{key}" for key, taken in steps.items() if taken]
    if tuning.enabled and tuning.parametrization in ("clipping", "affine") and in_vain:
        raise UserError(
            f"quantization.tuning.blocks.parametrization is {tuning.parametrization} (method "
            f"{settings.method}), which finds its own grids and integers, so what {', '.join(in_vain)} asks "
            "for would be lost: switch it off, or choose another parametrization"
        )


def _block_rates(parametrization: Parametrization, bits: int, width: int) -> tuple[float, float]:
    """Return the learning rates of integers and of scales in the tuning of blocks."""
    integers, scales = BLOCK_RATES[parametrization]
    if parametrization == "straight-through":  # rows of more weights move further in each step
        integers = _share(bits) * integers * _narrow(width)
    return integers, scales


def _narrow(width: int) -> float:
    """Return the share of a learning rate that a model of this hidden size bears."""
    return min(1.0, max(LEAST_SHARE, RATE_WIDTH / width))


def _share(bits: int) -> float:
    """Return the distance of two integers beside that at 2 bits, of the same range."""
    largest = 2.0**bits - 1
    return 3 / largest


def _products(given: Products, device: str) -> Products:
    if given == "auto":
        return "tf32" if device == "cuda" else "float32"
    return "float32" if given == "tf32" and device == "cpu" else given


def _either(given: T | None, decided: T) -> T:
    return decided if given is None else given
