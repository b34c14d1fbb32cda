"""A comparison is of one model and of the same texts, whatever their names are."""

from pathlib import Path

import pytest

from aespa_pl.commands.compare import compare
from aespa_pl.errors import UserError
from tests.commands.test_compare import SETTINGS, Runs, given, never, silent


@pytest.mark.parametrize("changed", ["text", "model", "part"])
def test_cells_of_another_text_or_model_are_not_put_into_one_table(changed: str, tmp_path: Path) -> None:
    """Options only name them, so that their content is compared."""
    model, text, part = tmp_path / "m", tmp_path / "words.txt", tmp_path / "part.txt"
    model.mkdir()
    weights = model / "model.safetensors"
    options = [
        f"--model.pretrained={model}", f"--data.evaluation.texts=['{text}', wikitext2]",
        f"--data.calibration.source={{'{part}': 1, c4: 1}}",
    ]  # fmt: skip
    for file in (weights, text, part):
        file.write_text("before")
    everything = Runs({f"{m}_w2_s{s}": 20.0 for m in ("rtn", "optq") for s in (0, 1)})
    compare(SETTINGS, given(tmp_path, *options), everything, silent())
    compare(SETTINGS, given(tmp_path, *options), never, silent())
    {"text": text, "model": weights, "part": part}[changed].write_text("behind")
    what = {"text": text, "model": "model.pretrained", "part": part}[changed]
    with pytest.raises(UserError, match=rf"content of {what} was \w+\.\.\. and is"):
        compare(SETTINGS, given(tmp_path, *options), never, silent())
