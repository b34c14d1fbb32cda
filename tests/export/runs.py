"""Finished runs of tiny models with known integers, written without the package's own code.

Weights are rounded to nearest; the first row of every matrix has zero point 0 and the second the largest,
because those are the rows that packers get wrong. Norms differ from the original's, as folding leaves them.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from tests.export.configurations import CONFIGS, HEADS, VOCABULARY
from tests.export.layers import EXPERTS, FUSED, HYBRIDS, IN_FILES, LAYERS, LLAMA_LAYERS, PATHS, WITH_EXPERTS

__all__ = ["CONFIGS", "HEADS", "VOCABULARY"]


@dataclass(frozen=True)
class Known:
    """A run, and what is known of it."""

    folder: Path
    original: Path
    matrices: dict[str, tuple[Tensor, Tensor, Tensor]]
    """By the weight's name in the model: integers, scale and zero point of its rows."""
    model: PreTrainedModel
    """The model with float32 weights ``scale * (q - z)``."""

    def weight(self, name: str) -> Tensor:
        return dequantized(*self.matrices[name])


def dequantized(q: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Compute ``scale * (q - z)`` in float64, and round once."""
    size = q.shape[1] // scale.shape[1]
    group_of = torch.arange(q.shape[1]) // size
    return (scale.double()[:, group_of] * (q.double() - zero.double()[:, group_of])).float()


def round_to_nearest(
    W: Tensor, bits: int, group_size: int | None, *, symmetric: bool, forced: bool
) -> tuple[Tensor, Tensor, Tensor]:
    parts = W.double().reshape(len(W), -1, group_size or W.shape[1])
    largest = 2**bits - 1
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scale = ((high - low) / largest).clamp(min=1e-6).half()
    zero = torch.round(-low / scale.double()).clamp(0, largest)
    if symmetric:
        zero[:] = 2 ** (bits - 1)
    elif forced:
        zero[0], zero[1] = 0, largest
    q = (torch.round(parts / scale.double()[..., None]) + zero[..., None]).clamp(0, largest)
    return q.reshape(W.shape).to(torch.uint8), scale, zero.to(torch.uint8)


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer of bytes with a few merges and two special tokens."""
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "n")]
    texts = [*sorted(ByteLevel.alphabet()), *("<s>", "</s>"), *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(BPE({text: i for i, text in enumerate(texts)}, merges))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteDecoder()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(
        folder
    )


def save_original(config: PreTrainedConfig, folder: Path, max_shard_size: str = "5GB") -> Path:
    """Write a model with random weights, biases and norms, in float16."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    one = 0 if config.model_type.startswith(("gemma", *HYBRIDS)) else 1  # whose norms add 1 themselves
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(noise * 0.06 if parameter.dim() > 1 else one + 0.2 * noise)
        for name, tensor in model.state_dict().items():
            if name.endswith(("correction_bias", "expert_bias")):  # decides which experts a token has
                tensor.copy_(torch.randn_like(tensor))
    model.half().save_pretrained(folder, max_shard_size=max_shard_size)
    save_tokenizer(folder)
    return folder


def make_run(
    original: Path,
    folder: Path,
    bits: int,
    group_size: int | None,
    *,
    symmetric: bool = False,
    forced: bool = True,
    bits_of: Mapping[str, int] | None = None,
) -> Known:
    """Write a finished run of a checkpoint; ``bits_of`` is about whole projections."""
    model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32).eval()
    kind = model.config.model_type
    if kind == "granitemoehybrid" and model.config.num_local_experts:
        kind = WITH_EXPERTS
    path, of_kind = PATHS.get(kind, "model.layers"), LAYERS.get(kind, LLAMA_LAYERS)
    all_layers = {*of_kind.values(), *FUSED.get(kind, {})}
    state, matrices = model.state_dict(), {}
    shards: list[dict[str, Tensor]] = [{}]
    (folder / "blocks").mkdir(parents=True)
    for index in range(model.config.num_hidden_layers):
        block = f"{path}.{index}"
        tensors: dict[str, Tensor] = {}
        present = {layer for layer in all_layers if f"{block}.{layer}.weight" in state}
        layers = {name: layer for name, layer in of_kind.items() if layer in present}
        fused = {layer: names for layer, names in FUSED.get(kind, {}).items() if layer in present}
        for name, layer in layers.items():
            found = round_to_nearest(
                state[f"{block}.{layer}.weight"], (bits_of or {}).get(name, bits), group_size,
                symmetric=symmetric, forced=forced,
            )  # fmt: skip
            matrices[f"{block}.{layer}.weight"] = found
            tensors |= named(name, found)
        for layer, names in fused.items():
            found = round_to_nearest(
                state[f"{block}.{layer}.weight"], bits, group_size,
                symmetric=symmetric, forced=forced,
            )  # fmt: skip
            matrices[f"{block}.{layer}.weight"] = found
            for part, name in enumerate(names):
                rows = rows_of(kind, name, part, len(found[0]))
                tensors |= named(name, tuple(tensor[rows] for tensor in found))
        experts = f"{block}.{EXPERTS.get(kind, 'mlp.experts')}"
        for name, weight in experts_of(state, experts):
            found = round_to_nearest(weight, bits, group_size, symmetric=symmetric, forced=forced)
            weight.copy_(dequantized(*found))
            matrices[f"{experts}.{name}.weight"] = found
            tensors |= named(f"expert_{name.replace('.', '_')}", found)
        save_file(tensors, folder / "blocks" / f"block_{index:03}.safetensors")
        shards.append({n: t for n, t in state.items() if n.startswith(f"{block}.")})
        for name, tensor in shards[-1].items():
            if name in matrices:
                tensor.copy_(dequantized(*matrices[name]))
            elif "norm" in name:
                tensor.copy_((tensor * 1.25).half())  # zeta has been folded into it
    tied = "lm_head.weight" if model.config.tie_word_embeddings else None
    shards[0] = {n: t for n, t in state.items() if not n.startswith(f"{path}.") and n != tied}
    shards = [{in_file(name): tensor for name, tensor in shard.items()} for shard in shards]
    # runs of earlier versions have no key bits_of
    several = {"bits_of": dict(bits_of)} if bits_of else {}
    write_run(original, folder, shards, bits, group_size, symmetric=symmetric, **several)
    return Known(folder, original, matrices, model)


def in_file(name: str) -> str:
    """Return the name that a tensor has in a model's files."""
    for library, file in IN_FILES.items():
        name = name.replace(library, file)
    return name


def experts_of(state: Mapping[str, Tensor], path: str) -> list[tuple[str, Tensor]]:
    """Return the matrices of each expert, views of those that transformers has for all of a block."""
    found = []
    for number, fused in enumerate(state.get(f"{path}.gate_up_proj", ())):
        down = state[f"{path}.down_proj"][number]
        if f"{path}.down_proj_bias" in state:  # gpt-oss: columns first, gate and up in turn
            parts = {"gate": fused[:, ::2].T, "up": fused[:, 1::2].T, "down": down.T}
        else:
            gate, up = fused.chunk(2)
            parts = {"gate": gate, "up": up, "down": down}
        found += [(f"{number}.{kind}_proj", weight) for kind, weight in parts.items()]
    return found


def named(name: str, found: tuple[Tensor, ...]) -> dict[str, Tensor]:
    what = ("integers", "scale", "zero_point")
    return {f"{name}.{w}": t.contiguous() for w, t in zip(what, found, strict=True)}


def rows_of(kind: str, name: str, part: int, count: int) -> list[int]:
    """Return the rows of one projection of a layer with ``count`` rows."""
    if kind == "bloom" or kind in HYBRIDS:  # which alternate from head to head
        parts = 3 if kind == "bloom" else 2
        size = count // (parts * HEADS)
        return [(parts * head + part) * size + i for head in range(HEADS) for i in range(size)]
    if name == "out_proj":
        return list(range(count))
    if name.endswith(("gate_proj", "up_proj")):
        return list(range(part * count // 2, (part + 1) * count // 2))
    ends = [0, count // 2, 3 * count // 4, count]  # two query heads for each key and value head
    return list(range(ends[part], ends[part + 1]))


def write_run(
    original: Path,
    folder: Path,
    shards: list[dict[str, Tensor]],
    bits: int,
    group_size: int | None,
    **quantization: Any,
) -> None:
    """Write the model folder, the journal and the configuration of a run."""
    target, count = folder / "model", len(shards)
    target.mkdir()
    where: dict[str, str] = {}
    records: dict[str, Any] = {}
    for i, shard in enumerate(shards):
        file = target / f"model-{i + 1:05}-of-{count:05}.safetensors"
        save_file({n: t.half().contiguous() for n, t in shard.items()}, file, {"format": "pt"})
        where |= dict.fromkeys(shard, file.name)
        if i:
            block = folder / "blocks" / f"block_{i - 1:03}.safetensors"
            sums = {f.relative_to(folder).as_posix(): sha(f) for f in (block, file)}
            records[str(i - 1)] = {"losses": {}, "seconds": {}, "files": sums}
    index = {"metadata": {}, "weight_map": where}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    for file in original.iterdir():
        if file.suffix != ".safetensors" and "index" not in file.name:
            shutil.copyfile(file, target / file.name)
    of_blocks = {file for record in records.values() for file in record["files"]}
    paths = {f.relative_to(folder).as_posix(): f for f in target.iterdir()}
    sums = {path: sha(f) for path, f in paths.items() if path not in of_blocks}
    journal = {
        "format": 2, "blocks": records,
        "fingerprint": {"model": fingerprint(original), "version of aespa-pl": "1.2.3"},
        "checkpoint": None, "portions": [], "damping": {}, "model": sums,
    }  # fmt: skip
    (folder / "journal.json").write_text(json.dumps(journal))
    settings = {
        "model": {"pretrained": str(original), "revision": None},
        "data": {"cache": None, "calibration": {"source": "embedded", "segments": 32, "segment_length": 64}},
        "quantization": dict(method="aespa", bits=bits, group_size=group_size, **quantization),
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    perplexity = {"original": {"embedded": 25.73}, "quantized": {"embedded": 31.134}}
    (folder / "metrics.json").write_text(json.dumps({"perplexity": perplexity}))


def sha(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def fingerprint(original: Path) -> str:
    """Compute what the journal has of the original: names, sizes, ends and other parts of its files."""
    digest = hashlib.sha256()
    for file in sorted([original / "config.json", *original.glob("*.safetensors")]):
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)}".encode())
        digest.update(content[: 2**20])
        for start in (len(content) * place // 1024 for place in range(1, 1024)):
            digest.update(content[start : start + 4096])
        digest.update(content[-(2**20) :])
    return digest.hexdigest()
