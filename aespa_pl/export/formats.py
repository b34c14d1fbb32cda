"""Find a format by its name; one whose library is not installed is refused before anything else."""

from importlib import import_module
from importlib.util import find_spec
from typing import Literal

from aespa_pl.errors import UserError
from aespa_pl.export.format import Format

FormatName = Literal["hf", "compressed-tensors", "awq", "gptq", "gguf"]

CLASSES = {
    "hf": "hf:HuggingFace",
    "compressed-tensors": "compressed_tensors:CompressedTensors",
    "awq": "awq:Awq",
    "gptq": "gptq:Gptq",
    "gguf": "gguf:Gguf",
}
"""Module and class by format: the libraries are imported with the format that needs them."""
CONTAINERS = ("compressed-tensors", "awq", "gptq")
"""The formats that may hold an integer in more bits than it has."""
LIBRARIES = {
    "compressed-tensors": "compressed_tensors",
    "awq": "compressed_tensors",  # which unpacks it in the proof
    "gguf": "gguf",
}
"""Library that has to be installed, by format."""


def make_format(
    name: FormatName, container_bits: int | None, embedding: Literal["keep", "q8_0"] | None
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
    if embedding == "q8_0" and name != "gguf":
        raise UserError(f"--embedding {embedding} is of --format gguf only: leave it out")
    if container_bits is not None and name not in CONTAINERS:
        raise UserError(
            f"--container_bits is of {', '.join(CONTAINERS)} only, not of {name}: leave it out"
        )
    module, _, kind = CLASSES[name].partition(":")
    options: dict[str, object] = {}
    if name == "gguf" and embedding is not None:
        options["embedding"] = embedding
    if name in CONTAINERS:
        options["container_bits"] = container_bits
    made: Format = getattr(import_module(f"aespa_pl.export.{module}"), kind)(**options)
    return made
