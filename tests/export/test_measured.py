"""An exported folder is measured as the run that it was made from."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from aespa_pl.commands.evaluate import measure_exported, quantized_folder
from aespa_pl.commands.export import export
from aespa_pl.data.tokens import evaluation_tokens
from aespa_pl.evaluation.perplexity import perplexity, tokens_of
from aespa_pl.settings import DataSettings, EvaluationSettings, ModelSettings, TaskSettings
from tests.export.conftest import MakeRun
from tests.models.test_streamed import open_stream


@pytest.mark.parametrize("name", ["compressed-tensors", "hf", "model"])
def test_perplexity_of_an_export_is_that_of_the_runs_own_folder(
    known: MakeRun, tmp_path: Path, name: Any
) -> None:
    """One is streamed and rounded to float16, the other loaded whole: scales times integers."""
    run, folder = known("llama", 4, 32), tmp_path / "packed"
    if name == "model":  # of the run itself
        shutil.copytree(run.folder / "model", folder)
        (folder / "quantization.json").write_text("{}")
    else:
        export(str(run.folder), format=name, output=str(folder), verify="bytes")
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and looked at the dog. " * 40)
    model = ModelSettings(pretrained=str(folder), dtype="float32")
    assert quantized_folder(model) == folder
    evaluation = EvaluationSettings(texts=[str(text)], segment_length=16)
    data = DataSettings(evaluation=evaluation, cache=str(tmp_path / "cache"))
    metrics = measure_exported(folder, model, data, TaskSettings(), torch.device("cpu"))
    source = open_stream(run.folder / "model")
    tokens = evaluation_tokens(str(text), source.pretrained.tokenizer(), 16, None, tmp_path / "cache")
    expected = perplexity(source, {"text": tokens}, batch_size=4)["text"]
    assert metrics["perplexity"]["quantized"] == {"text.txt": pytest.approx(expected, rel=1e-3)}
    assert metrics["tokens"] == tokens_of({"text.txt": tokens})
    assert json.loads((folder / "test.json").read_text()) == metrics
    assert "perplexity, text.txt" in (folder / "test.md").read_text()
