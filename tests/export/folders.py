"""A run becomes an exported folder: written and proved, loaded, its files and model card looked at."""

from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM, PreTrainedModel

from aespa_pl.export.format import Format, prove
from aespa_pl.export.quantized import QuantizedModel


def written(run: Path, chosen: Format, folder: Path) -> QuantizedModel:
    """Write a run in a format that can hold it, prove the folder, and return what it was written from."""
    model = QuantizedModel.open(run)
    chosen.refuse(model)
    folder.mkdir(parents=True, exist_ok=True)
    chosen.write(model, folder, lambda: None)
    prove(model, chosen, folder)
    return model


def load(folder: Path, dtype: torch.dtype | str = "auto") -> PreTrainedModel:
    """Load a folder with the library, and refuse any tensor missing or left over."""
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def card(folder: Path) -> tuple[dict[str, Any], str]:
    _, header, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(header), text
