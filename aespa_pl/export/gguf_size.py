"""Compute how large a GGUF file becomes, before the run that it is made of."""

import tempfile
from pathlib import Path

from gguf import GGUFWriter

from aespa_pl.export.gguf import Gguf
from aespa_pl.export.quantized import QuantizedModel

ALIGNMENT = 32
"""Bytes that each tensor of a file is padded to a multiple of."""


def file_bytes(model: QuantizedModel) -> int:
    """Return the size of the file of a model whose matrices have block types.

    All that stands before the data is written to a temporary file, because its size depends on the
    vocabulary. ``model`` need not have been quantized: only its settings and shapes are looked at.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "head.gguf"
        writer = Gguf().begin(model, path)
        writer.close()
        before = path.stat().st_size
    sizes = [info.nbytes for shard in writer.tensors for info in shard.values()]
    return sum(map(padded, (before, *sizes)))


def padded(size: int) -> int:
    """Return the bytes that a part of a file takes."""
    return int(GGUFWriter.ggml_pad(size, ALIGNMENT))
