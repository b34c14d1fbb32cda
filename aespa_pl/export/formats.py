"""The formats by name; one whose library is not installed is refused before anything else."""

from importlib.util import find_spec
from typing import Literal

from aespa_pl.errors import UserError
from aespa_pl.export.format import Format

FormatName = Literal["hf", "compressed-tensors", "awq", "gptq", "gguf"]

LIBRARIES = {
    "compressed-tensors": "compressed_tensors",
    "awq": "compressed_tensors",  # which unpacks it in the proof
    "gguf": "gguf",
}
"""By format, the library that has to be installed."""


def make_format(
    name: FormatName, container_bits: int | None, embedding: Literal["keep", "q8_0"]
) -> Format:
    """Return a format with the user's choices.

    Raises:
        UserError: Its library is missing, or a choice is none of this format's.
    """
    library = LIBRARIES.get(name)
    if library is not None and find_spec(library) is None:
        raise UserError(
            f"--format {name} needs the library {library.replace('_', '-')}: "
            "pip install 'aespa-pl[export]'"
        )
    if embedding != "keep" and name != "gguf":
        raise UserError(f"--embedding {embedding} is of --format gguf only: leave it out")
    if container_bits is not None and name in ("hf", "gguf"):
        raise UserError(
            f"--container_bits is of compressed-tensors, awq and gptq only, not of {name}: leave it out"
        )
    # the libraries are imported with the format that needs them
    match name:
        case "hf":
            from aespa_pl.export.hf import HuggingFace

            return HuggingFace()
        case "compressed-tensors":
            from aespa_pl.export.compressed_tensors import CompressedTensors

            return CompressedTensors(container_bits)
        case "awq":
            from aespa_pl.export.awq import Awq

            return Awq(container_bits)
        case "gptq":
            from aespa_pl.export.gptq import Gptq

            return Gptq(container_bits)
        case "gguf":
            from aespa_pl.export.gguf import Gguf

            return Gguf(embedding)
