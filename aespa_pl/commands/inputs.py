"""Keep what a caller has in memory in files, which a run reads, now and when it is resumed."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from aespa_pl.data.tokens import TENSOR
from aespa_pl.errors import UserError
from aespa_pl.models.headers import read_header
from aespa_pl.run.journal import checksum
from aespa_pl.storage.files import disk_errors, write_json, write_tensors, write_text

FOLDER = "inputs"
"""Folder beside the runs of a name; what several runs have in common is in it once."""


def keep_model(folder: Path, model: PreTrainedModel, tokenizer: Any) -> str:
    """Return the folder of a model in memory, in its own types. Raises UserError where it can't be kept."""
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise UserError(
            "tokenizer is missing: give the tokenizer of a model that is in memory, because the quantized "
            "model is stored with it"
        )
    if any(weight.is_meta for weight in model.parameters()):
        raise UserError("model has weights on the meta device: load it whole, or give its name or folder")

    def write(made: Path) -> None:
        model.save_pretrained(made, max_shard_size="4GB")
        tokenizer.save_pretrained(made)
        # a model's fingerprint has the names of its files, but not all of the weights
        places = dict[str, str]()
        for file in sorted(made.glob("*.safetensors")):
            name = f"model-{checksum(file)[:16]}.safetensors"
            places |= dict.fromkeys(read_header(file), name)
            file.rename(made / name)
        write_json(made / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})

    return str(_keep(folder, "model", write))


def keep_text(folder: Path, given: Any, name: str) -> str:
    """Return the file of texts or of token ids ``[segments, L]`` that are in memory."""
    if is_texts(given):
        file = f"{name}.jsonl"
        lines = "".join(json.dumps({"text": text}) + "\n" for text in given)
        kept = _keep(folder, name, lambda made: write_text(made / file, lines))
    else:
        file, tokens = f"{name}.safetensors", {TENSOR: token_ids(given, name)}
        kept = _keep(folder, name, lambda made: write_tensors(made / file, tokens, {}))
    return str(kept / file)


def is_texts(given: Any) -> bool:
    """Tell whether something is a sequence of texts."""
    is_sequence = isinstance(given, Sequence) and not isinstance(given, str)
    return bool(is_sequence and given and all(isinstance(text, str) for text in given))


def token_ids(given: Any, name: str) -> Tensor:
    """Return token ids ``[segments, L]``. Raises UserError where it is neither a text nor token ids."""
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


def _keep(folder: Path, name: str, write: Callable[[Path], None]) -> Path:
    """Return a folder with all that ``write`` makes, named after its content."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder, prefix=".") as temporary:
            made = Path(temporary, name)
            made.mkdir()
            write(made)
            content = hashlib.sha256()
            for file in sorted(path for path in made.rglob("*") if path.is_file()):
                content.update(f"{file.relative_to(made)} {checksum(file)}\n".encode())
            target = folder / f"{name}-{content.hexdigest()[:16]}"
            if not target.is_dir():
                made.rename(target)
    return target.absolute()
