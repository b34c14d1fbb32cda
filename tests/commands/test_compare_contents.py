"""A comparison is of one model and of the same texts, whatever their names are."""

from pathlib import Path

import pytest

from aespa_pl.commands.compare import compare, run
from aespa_pl.data.texts import CALIBRATION_KEY, EVALUATION_KEY
from aespa_pl.errors import UserError
from aespa_pl.run.interruption import Interruption
from tests.commands.test_compare import SETTINGS, Runs, given, never, silent

EVERY = [f"{method}_w2_s{seed}" for method in ("rtn", "optq") for seed in (0, 1)]


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
    everything = Runs(dict.fromkeys(EVERY, 20.0))
    compare(SETTINGS, given(tmp_path, *options), everything, silent())
    compare(SETTINGS, given(tmp_path, *options), never, silent())
    {"text": text, "model": weights, "part": part}[changed].write_text("behind")
    what = {"text": text, "model": "model.pretrained", "part": part}[changed]
    with pytest.raises(UserError, match=rf"content of {what} was \w+\.\.\. and is"):
        compare(SETTINGS, given(tmp_path, *options), never, silent())


@pytest.mark.parametrize("text", ["{'a.txt': 1, 'typo.txt': 1}", "[wikitext2, typo.txt]", "typo.safetensors"])
def test_a_text_that_is_not_there_is_one_message_and_no_cell(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("text")
    key = EVALUATION_KEY if text.startswith("[") else CALIBRATION_KEY
    with pytest.raises(UserError, match=rf"^{key}: typo\.\w+ is neither c4, "):
        run(["compare", f"--{key}={text}"], Interruption())
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_comparison_that_is_refused_is_not_said_to_go_on(tmp_path: Path) -> None:
    interruption = Interruption()
    compare(SETTINGS, given(tmp_path), Runs(dict.fromkeys(EVERY, 20.0)), silent())
    with pytest.raises(UserError, match="has a comparison with other options"):
        run(["compare", *given(tmp_path, "--quantization.group_size=32").words], interruption)
    assert interruption.how_to_continue is None
