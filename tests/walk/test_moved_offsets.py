"""How far integers have moved on disk is read from the files that the tuning has left, and no others."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from aespa_pl.errors import UserError
from aespa_pl.run.journal import Run
from aespa_pl.run.schema import TuningRecord
from aespa_pl.storage.files import checksum
from aespa_pl.walk.model_tuner import offsets


def test_a_damaged_file_is_named_with_what_to_do(tmp_path: Path) -> None:
    run = Run.create(tmp_path, {})
    files = [run.moved_folder / "step_4" / f"block_{index:03}.safetensors" for index in range(2)]
    files[0].parent.mkdir(parents=True)
    for index, file in enumerate(files):
        save_file({"layer": torch.full((2,), 0.5 * index).half()}, file)
    found = TuningRecord(start_error=1, error=0.5, epoch=1, changed=0.1, finite=True)
    save_file({"norm": torch.ones(2)}, run.tuned_file)
    assert offsets(run, 0) == {}
    run.finish_tuning(found, {}, files)
    run = Run.open(run.folder)
    assert offsets(run, 1)["layer"].tolist() == [0.5, 0.5]
    save_file({"layer": torch.zeros(2).half()}, files[1])
    with pytest.raises(UserError, match=r"block_001.safetensors is missing or changed: remove .*tuned"):
        offsets(run, 1)
    files[0].unlink()
    with pytest.raises(UserError, match="block_000"):
        offsets(run, 0)


def test_files_outside_of_the_run_are_not_read(tmp_path: Path) -> None:
    """The journal may be somebody else's."""
    run = Run.create(tmp_path / "runs", {})
    save_file({"norm": torch.ones(2)}, run.tuned_file)
    outside = tmp_path / "block_000.safetensors"
    save_file({"layer": torch.ones(2)}, outside)
    run.finish_tuning(TuningRecord(start_error=1, error=0.5, epoch=1, changed=0.1, finite=True), {}, [])
    journal = json.loads(run.journal_file.read_text())
    journal["tuned"]["moved"] = {str(outside): checksum(outside)}
    run.journal_file.write_text(json.dumps(journal))
    with pytest.raises(UserError, match=r"is damaged.*tuned\.moved"):
        Run.open(run.folder)
