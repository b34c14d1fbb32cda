"""Fill in, from the method, the settings that the user leaves at null."""

from dataclasses import replace
from typing import Literal, TypeVar

from aespa_pl.errors import UserError
from aespa_pl.methods import METHODS
from aespa_pl.settings import QuantizationSettings

T = TypeVar("T")
Products = Literal["auto", "float32", "tf32", "bfloat16"]


def resolved(settings: QuantizationSettings, device: str = "cpu") -> QuantizationSettings:
    """Return the settings with every null that the method decides filled in, and without auto.

    Settings that are resolved already come back as they are.

    Args:
        settings: Of the user.
        device: Type of the device that blocks run on.

    Raises:
        UserError: The method is unknown, or settings contradict each other.
    """
    method = METHODS.get(settings.method)
    if method is None:
        raise UserError(f"quantization.method is {settings.method}: {', '.join(METHODS)}")
    grid, objective, rounding = settings.grid, settings.objective, settings.rounding
    blocks, model = settings.tuning.blocks, settings.tuning.model
    found = replace(
        settings,
        products=_products(settings.products, device),
        input_correction=_either(settings.input_correction, method.input_correction),
        grid=replace(
            grid,
            search=_either(grid.search, method.search),
            zfold=_either(grid.zfold, method.zfold),
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
            blocks=replace(blocks, enabled=_either(blocks.enabled, method.tune_blocks)),
            model=replace(model, enabled=_either(model.enabled, method.tune_model)),
        ),
    )
    if found.grid.zfold and not found.grid.search:
        raise UserError(
            f"quantization.grid.zfold is true and quantization.grid.search is false (method "
            f"{method.name}): zeta is fitted by the search, so switch both on or both off"
        )
    return found


def _products(given: Products, device: str) -> Products:
    if given != "auto":
        return given
    return "tf32" if device == "cuda" else "float32"


def _either(given: T | None, decided: T) -> T:
    return decided if given is None else given
