"""A run becomes a GGUF file, which is written, proved and read back."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType, GGUFReader

from aespa_pl.export.gguf import Gguf
from tests.export.folders import written
from tests.export.runs import Known

Q = GGMLQuantizationType
llama_cpp = pytest.mark.skipif(
    find_spec("xllamacpp") is None, reason="needs llama.cpp: pip install xllamacpp"
)


def write(known: Known, folder: Path, chosen: Gguf | None = None) -> GGUFReader:
    written(known.folder, chosen or Gguf(), folder)
    return GGUFReader(folder / "model.gguf")
