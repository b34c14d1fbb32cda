"""A run becomes a GGUF file, which is written, proved and read back."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType, GGUFReader

from aespa_pl.export.format import prove
from aespa_pl.export.gguf import Gguf
from aespa_pl.export.quantized import QuantizedModel
from tests.export.runs import Known

Q = GGMLQuantizationType
llama_cpp = pytest.mark.skipif(
    find_spec("xllamacpp") is None, reason="needs llama.cpp: pip install xllamacpp"
)


def write(known: Known, folder: Path, chosen: Gguf | None = None) -> GGUFReader:
    model, chosen = QuantizedModel.open(known.folder), chosen or Gguf()
    chosen.refuse(model)
    chosen.write(model, folder, lambda: None)
    prove(model, chosen, folder)
    return GGUFReader(folder / "model.gguf")
