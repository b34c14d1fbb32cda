"""Find the keys of a command line that would do nothing, and that a user therefore means otherwise."""

from operator import attrgetter
from typing import Any

from aespa_pl.commands.arguments import Arguments
from aespa_pl.errors import UserError
from aespa_pl.run.journal import Run
from aespa_pl.run.stored_settings import stored_quantization
from aespa_pl.settings import QuantizationSettings

SECTION = "quantization."
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


def _typed(given: Arguments) -> list[str]:
    """Return the keys that no configuration has, each once."""
    keys = (option.key.removesuffix("+") for option in given.given() if not option.file)
    return list(dict.fromkeys(keys))


def _value(settings: QuantizationSettings, key: str) -> Any:
    return attrgetter(key.removeprefix(SECTION))(settings)
