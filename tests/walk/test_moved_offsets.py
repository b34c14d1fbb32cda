"""How far integers have moved on disk is read from the files that the tuning has left, and no others."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from aespa_pl.errors import UserError
from aespa_pl.run.journal import Run
from aespa_pl.storage.files import checksum
from aespa_pl.walk.model_tuner import offsets


def test_a_damaged_file_is_named_with_what_to_do(tmp_path: Path) -> None:
    run = Run.create(tmp_path, {})
    files = [run.moved_folder / "step_4" / f"block_{index:03}.safetensors" for index in range(2)]
    files[0].parent.mkdir(parents=True)
    for index, file in enumerate(files):
        save_file({"layer": torch.full((2,), 0.5 * index).half()}, file)
    known = {file.relative_to(run.folder).as_posix(): checksum(file) for file in files}
    save_file({"norm": torch.ones(2)}, run.tuned_file, known)
    assert offsets(run, 1)["layer"].tolist() == [0.5, 0.5]
    save_file({"layer": torch.zeros(2).half()}, files[1])
    with pytest.raises(UserError, match=r"block_001.safetensors is missing or changed: remove .*tuned"):
        offsets(run, 1)
    files[0].unlink()
    with pytest.raises(UserError, match="block_000"):
        offsets(run, 0)
    save_file({"norm": torch.ones(2)}, run.tuned_file)
    assert offsets(run, 0) == {}
