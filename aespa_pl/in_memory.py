"""Write models, texts and token ids that are in memory into files, from which a run reads them."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from aespa_pl.errors import UserError, one_line
from aespa_pl.models.headers import read_header
from aespa_pl.storage.cache import alone_in
from aespa_pl.storage.files import checksum, disk_errors, write_json

UNFINISHED = ".unfinished"
"""Begins the names of folders that are written to."""


def keep_model(folder: Path, model: PreTrainedModel, tokenizer: Any) -> str:
    """Return the folder of a model in memory, in its own types. Raises UserError where it can't be kept."""
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise UserError("tokenizer is missing: give that of the model, because the run is stored with it")
    if any(weight.is_meta for weight in model.parameters()):
        raise UserError("model has weights on the meta device: load it whole, or give its name or folder")
    if any(".base_layer." in name for name, _ in model.named_parameters()):
        raise UserError("model has adapters: give what their merge_and_unload() returns")

    def write(made: Path) -> None:
        try:
            model.save_pretrained(made, max_shard_size="4GB")
        except ValueError as error:  # of a generation_config that the library does not write
            reason = one_line(str(error))
            raise UserError(f"model can't be saved ({reason}): correct model.generation_config") from error
        tokenizer.save_pretrained(made)
        # a model's fingerprint has the names of its files, but not all of the weights
        places = dict[str, str]()
        for file in sorted(made.glob("*.safetensors")):
            name = f"model-{checksum(file)[:16]}.safetensors"
            places |= dict.fromkeys(read_header(file), name)
            file.rename(made / name)
        write_json(made / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})

    return str(kept(folder, "model", write))


def token_ids(given: Any, name: str) -> Tensor:
    """Return token ids ``[segments, L]``."""
    try:
        tokens = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"{name} is a {type(given).__name__}: expected the name of a text, a file, a list of texts, or "
            "token ids [segments, tokens]"
        ) from error
    if tokens.dim() != 2 or tokens.is_floating_point() or not tokens.numel():
        raise UserError(
            f"{name} has the shape {[*tokens.shape]} and the type {tokens.dtype}: expected integers "
            "[segments, tokens]"
        )
    return tokens.to("cpu", torch.int64).contiguous()


def kept(folder: Path, name: str, write: Callable[[Path], None]) -> Path:
    """Return a folder in ``folder`` with all that ``write`` makes, named after its content."""
    with disk_errors(folder), alone_in(folder):
        for left in folder.glob(f"{UNFINISHED}*"):  # by a process that was killed
            shutil.rmtree(left)
        with TemporaryDirectory(dir=folder, prefix=UNFINISHED) as temporary:
            made = Path(temporary, name)
            made.mkdir()
            write(made)
            content = _checksum(made)
            target = folder / f"{name}-{content[:16]}"
            if target.is_dir() and _checksum(target) != content:  # such as after a power cut
                shutil.rmtree(target)
            if not target.is_dir():
                made.rename(target)
    return target.absolute()


def _checksum(folder: Path) -> str:
    """Return the SHA-256 of the names and contents of all files in a folder."""
    content = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        content.update(f"{file.relative_to(folder)} {checksum(file)}\n".encode())
    return content.hexdigest()
