"""Find the keys of a command line that would do nothing, and that a user therefore means otherwise."""

from operator import attrgetter
from pathlib import Path
from typing import Any

from aespa_pl.commands.arguments import Arguments
from aespa_pl.errors import UserError
from aespa_pl.run.journal import Run
from aespa_pl.run.stored_settings import stored_quantization
from aespa_pl.settings import QuantizationSettings

SECTION = "quantization."
SWITCHES = ("enabled", "learn")  # keys that switch a step on or off, and that always act
NOT_STORED = "quantization.rounding.iterations"  # may change in a run, so its journal does not have it


def refuse_other_quantization(given: Arguments, asked: QuantizationSettings, run: Run) -> None:
    """Raise UserError where the command line asks to measure another quantization than that of the run.

    A configuration may hold another one: it names the model and the texts.
    """
    stored = stored_quantization(run)
    keys = [key for key in _typed(given) if key.startswith(SECTION) and key != NOT_STORED]
    values = {key: (_value(asked, key), _value(stored, key)) for key in keys}
    if others := [
        f"{key} is {ours}, but the run has {its}" for key, (ours, its) in values.items() if ours != its
    ]:
        raise UserError(
            f"{'; '.join(others)} ({run.folder}): choose another run by --ckpt_path or --output.name, or "
            "leave it out"
        )


def refuse_beside_packed(given: Arguments, folder: Path) -> None:
    """Raise UserError where the command line asks for a quantization of a packed model, which has its own."""
    if others := [key for key in _typed(given) if key.startswith(SECTION)]:
        raise UserError(
            f"{', '.join(others)}: model.pretrained is the packed model {folder}, measured as it is: "
            "leave them out"
        )


def without_effect(given: Arguments, settings: QuantizationSettings, *, local: bool = False) -> str:
    """Return in one line which keys of the command line, of steps that are not done, have no effect.

    A configuration may have them: it is laid over several methods. Nor has a revision of a ``local`` model.
    """
    idle: dict[str, list[str]] = {}
    for key in _typed(given):
        parts = (part for part in _steps(settings).items() if key.startswith(part[0]))
        is_done, words = next(parts, ("", (True, "")))[1]
        if not is_done and not key.endswith(SWITCHES):
            idle.setdefault(words, []).append(key)
    said = [f"{', '.join(k)} {'has' if len(k) == 1 else 'have'} no effect: {w}" for w, k in idle.items()]
    text = [f"{'; '.join(said)} (method {settings.method})"] if said else []
    if local and "model.revision" in _typed(given):
        text.append("model.revision has no effect: model.pretrained is no name on the hub")
    return "; ".join(text)


def _steps(settings: QuantizationSettings) -> dict[str, tuple[bool, str]]:
    """Return whether steps with keys of their own are done, and what to say where not, by how keys begin."""
    tuning, learns = settings.tuning, settings.rounding.learn != "none"
    # whose penalty has the warm-up and the exponents of the section rounding
    rounds_in_tuning = bool(tuning.blocks.enabled) and tuning.blocks.parametrization == "rounding"
    return {
        "output.histograms": (learns, "no rounding is learned"),
        "quantization.rounding.iterations": (learns, "no rounding is learned"),
        "quantization.rounding.": (learns or rounds_in_tuning, "no rounding is learned"),
        "quantization.objective.end_loss": (
            settings.follows_rows,
            "integers are neither polished nor learned",
        ),
        "quantization.objective.query_key_damping": (
            settings.objective.couples_scores,
            "Q and K have no objective of their own",
        ),
        "quantization.objective.value_tokens": (
            settings.objective.value == "attention",
            "V has no objective of its own",
        ),
        "quantization.grid.max_rounds": (bool(settings.grid.zfold), "there is no zeta"),
        "quantization.optq.rows": (bool(settings.optq.enabled), "OPTQ is not run"),
        "quantization.damping": (settings.uses_inputs, "no statistics are taken"),
        "quantization.tuning.blocks.penalty": (rounds_in_tuning, "no rounding is learned in blocks"),
        "quantization.tuning.blocks.transformation_rate": (
            tuning.blocks.parametrization in ("clipping", "affine"),
            "blocks learn no clipping or factors",
        ),
        "quantization.polish.": (bool(settings.polish.enabled), "integers are not polished"),
        "quantization.tuning.blocks.": (bool(tuning.blocks.enabled), "blocks are not tuned"),
        "quantization.tuning.model.": (bool(tuning.model.enabled), "the model is not tuned end to end"),
        "quantization.tuning.": (tuning.enabled, "nothing is tuned"),
    }


def _typed(given: Arguments) -> list[str]:
    """Return the keys that no configuration has, each once."""
    keys = (option.key.removesuffix("+") for option in given.given() if not option.file)
    return list(dict.fromkeys(keys))


def _value(settings: QuantizationSettings, key: str) -> Any:
    return attrgetter(key.removeprefix(SECTION))(settings)
