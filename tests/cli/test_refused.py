"""A damaged model and a full disk are refused before anything is computed."""

import errno
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.cli.commands import LAST, NO_TEXTS, CommandLine, Done, small
from tests.disks import leave_free


def put_nan(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 2] = math.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"no config\.json"),
        (put_nan, r"layers\.1\.mlp\.down_proj\.weight .*NaN or infinite"),
    ],
)
def test_damaged_model_is_refused_before_calibration(
    aespa: CommandLine, model: Path, damage: Any, message: str
) -> None:
    shutil.copytree(model, "model")
    damage(Path("model"))
    status, out, err = aespa("fit", *small(Path("model")))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert re.search(message, err)


def test_space_that_a_run_has_filled_itself_is_not_asked_for_again(
    aespa: CommandLine, model: Path, unmeasured: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*small(model), *NO_TEXTS]
    run = unmeasured.copied()
    (run / "metrics.json").unlink()
    # each file of the run is worth a MB to the second look: more than such a model needs
    (run / "ballast").write_bytes(bytes(2**20))
    leave_free(monkeypatch, 0)
    assert aespa("fit", *arguments)[0] == 2
    assert aespa("fit", *arguments, *LAST)[0] == 0
    (run / "metrics.json").unlink()
    (run / "ballast").unlink()
    shutil.rmtree(run / "model")
    status, _, err = aespa("fit", *arguments, *LAST)
    assert status == 2
    assert "or move the run's folder" in err  # a run goes on where it is
    assert "--output.folder" not in err


@pytest.mark.parametrize("target", [(), ("--quantization.target", 3.5)])
def test_full_disk_is_said_before_anything_is_computed(
    aespa: CommandLine, model: Path, target: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_free(monkeypatch, 1000)
    monkeypatch.setattr("aespa_pl.commands.target.predicted_losses", lambda *_: pytest.fail("chosen"))
    status, _, err = aespa("fit", *small(model), *target, "--output.folder", "new/runs")
    assert (status, err.count("\n")) == (2, 1)
    assert re.search(r"1\.0 KB free, but about [\d.]+ KB more are needed.* --output\.folder", err)
    assert not Path("new").exists()


def test_a_file_of_the_model_that_cannot_be_read_is_named_at_once(
    aespa: CommandLine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is copied after the last block. Root may read any file, so the disk fails."""
    shutil.copytree(model, "model")
    licence = Path("model", "LICENSE")
    licence.touch()
    read = Path.read_bytes

    def fail(path: Path) -> bytes:
        if path.name == licence.name:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", fail)
    status, _, err = aespa("fit", *small(Path("model")))
    assert (status, err) == (2, f"aespa-pl: {licence}: Input/output error\n")
    assert not list(Path().glob("lightning_logs/aespa/version_*"))


def test_a_text_whose_hidden_states_do_not_fit_is_refused_where_it_is_measured(
    aespa: CommandLine, model: Path, finished: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished.copied()
    monkeypatch.setattr("aespa_pl.commands.limits.free_bytes", lambda _: 10)
    for words in (("fit",), ("test",), ("fit", "--quantization.target", 3.5)):
        status, _, err = aespa(*words, *small(model), "--trainer.accelerator", "cpu")
        assert (status, err.count("\n")) == (2, 1)
        assert "the hidden states of embedded take" in err
    status, out, err = aespa("fit", *small(model), *LAST)
    assert (status, err) == (0, "")
    assert "finished already" in out
