"""Fill in, from the method, the settings that the user leaves at null."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aespa_pl.errors import UserError
from aespa_pl.methods import METHODS, Parametrization
from aespa_pl.settings import QuantizationSettings
from aespa_pl.settings.quantization import bits_of_type

RATE_WIDTH, LEAST_FACTOR = 192, 0.2
"""Hidden size up to which two learning rates hold, and the factor that is left of them at five times that
and more: of integers in the tuning of blocks, and of scales end to end (docs/tuning.md)."""
BLOCK_RATES: dict[Parametrization, tuple[float, float]] = {
    "straight-through": (0.005, 0.003),  # at 2 bits, up to RATE_WIDTH
    "annealed": (0.005, 0.003),
    "rounding": (0.4, 0.003),
    "clipping": (0.005, 0.01),
    "affine": (0.005, 0.01),
}
"""Learning rates of integers and of scales in the tuning of blocks, by what is learned of a weight."""
# what learns latent values in distances of two integers, whatever the grid
MOVING: tuple[Parametrization, ...] = ("straight-through", "annealed")
MODEL_INTEGER_RATE, MODEL_SCALE_RATE = 0.02, 0.003  # of the end-to-end tuning at 2 bits
TYPE_BLOCK_RATES = (0.0025, 0.001)
"""Rates of integers and of scales with block types, in the tuning of blocks: their grids are finer, and a
group's scale is an integer of few bits, which long steps move back and forth (docs/tuning.md)."""
TYPE_MODEL_INTEGER_RATE, TYPE_MODEL_SCALE_RATE = 0.015, 0.0025  # of the end-to-end tuning at 2 bits
LARGEST_TYPE_SCALE_RATE = 0.001  # of the end-to-end tuning, whatever the bits


def resolved(
    settings: QuantizationSettings,
    device: str = "cpu",
    width: int | None = RATE_WIDTH,
    segments: int | None = None,
    bits: int | None = None,
) -> QuantizationSettings:
    """Return the settings with every null that the method decides filled in, and without auto.

    Settings that are resolved already come back unchanged. ``device`` is the type of the device that blocks
    run on, ``width`` the hidden size of the model; without it learning rates stay null. ``bits`` are those
    of most projections, which the rates are for; null: what ``settings.bits`` says. Integers stay in the
    end-to-end tuning where so many calibration ``segments`` give too few steps to move one. Raises UserError
    where settings contradict each other.
    """
    method = METHODS[settings.method]
    learned = settings.tuning.blocks.parametrization or method.parametrization
    if settings.format != "uniform":
        if learned not in MOVING:
            raise UserError(
                f"quantization.format is {settings.format}, whose types "
                f"quantization.tuning.blocks.parametrization {learned} (method {settings.method}) can't "
                "learn: choose straight-through or annealed, or another method"
            )
        bits = bits or (settings.bits if settings.format == "auto" else bits_of_type(settings.format))
        settings = replace(settings, bits=bits, bits_of={})
    elif settings.target is not None:
        settings = replace(settings, bits=bits or settings.bits)
    rates = {} if width is None else _rates(settings, learned, width, segments, bits or settings.bits)
    decided = {
        "input_correction": method.input_correction,
        "grid": {"search": method.search, "zfold": method.zfold, "awq": method.awq},
        "optq": {"enabled": method.optq, "rows": method.optq_rows},
        "objective": {"query_key": method.query_key, "value": method.value},
        "rounding": {"learn": method.learn, "keep_best": method.keep_best},
        "polish": {"enabled": method.polish},
        "tuning": {
            "blocks": {
                "enabled": method.tune_blocks,
                "parametrization": method.parametrization,
                "unit": method.unit,
                "epochs": method.epochs,
                **rates.get("blocks", {}),
            },
            "model": {"enabled": method.tune_model, **rates.get("model", {})},
        },
    }
    products = settings.products
    if products == "auto":
        products = "tf32" if device == "cuda" else "float32"
    elif (products, device) == ("tf32", "cpu"):
        products = "float32"
    filled: QuantizationSettings = replace(_filled(settings, decided), products=products)
    _refuse_contradictions(filled)
    if not filled.follows_rows:
        filled = replace(filled, objective=replace(filled.objective, end_loss=False))
    return filled


def _filled(section: Any, decided: Mapping[str, Any]) -> Any:
    """Return a section, and the sections in it, with what is decided in the place of nulls."""
    values = {}
    for name, value in decided.items():
        given = getattr(section, name)
        if isinstance(value, Mapping):
            values[name] = _filled(given, value)
        elif given is None:
            values[name] = value
    return replace(section, **values)


def _refuse_contradictions(settings: QuantizationSettings) -> None:
    grid = settings.grid
    for key in ("zfold", "exhaustive", "awq"):
        if getattr(grid, key) and not grid.search:
            raise UserError(
                f"quantization.grid.{key} is true and quantization.grid.search is false (method "
                f"{settings.method}), but it is a part of the search: switch both on or both off"
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


def _rates(
    settings: QuantizationSettings, learned: Parametrization, width: int, segments: int | None, bits: int
) -> dict[str, dict[str, float]]:
    """Return the learning rates of integers and of scales in the tuning of blocks, and of the model.

    ``bits`` are those of most projections. Rates of integers are for ``settings.bits``; each projection has
    its own in proportion.
    """
    narrow = min(1.0, max(LEAST_FACTOR, RATE_WIDTH / width))
    step = 3 / (2.0**settings.bits - 1)  # distance of two integers beside that at 2 bits, of the same range
    error = step**2  # rounding's error beside that at 2 bits
    most = 3 / (2.0**bits - 1)
    model = settings.tuning.model
    if settings.format == "uniform":
        integers, scales = BLOCK_RATES[learned]
        of_model, model_scales = MODEL_INTEGER_RATE * error, MODEL_SCALE_RATE * min(most**2, narrow)
    else:
        integers, scales = TYPE_BLOCK_RATES
        of_model = TYPE_MODEL_INTEGER_RATE * error
        model_scales = min(LARGEST_TYPE_SCALE_RATE, TYPE_MODEL_SCALE_RATE * most) * narrow
    if learned in MOVING:  # rows of more weights move further in each step
        integers = step * integers * narrow
    # Adam's steps are about as long as the rate, whose mean is half of the largest; an integer is half a step
    # from the next one
    if segments is not None and model.epochs * segments // model.batch_size * of_model * most / step < 1:
        of_model = 0.0
    return {
        "blocks": {"integer_rate": integers, "scale_rate": scales},
        "model": {"integer_rate": of_model, "scale_rate": model_scales},
    }
