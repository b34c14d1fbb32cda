"""Make projections of the shapes of known models, with random weights and statistics: no model is needed."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, OPTConfig, PreTrainedConfig, Qwen3MoeConfig


class Shape(NamedTuple):
    """Says how large a block is."""

    hidden: int
    wide: int
    """Width of the feed-forward part."""
    heads: int
    gated: bool
    """Whether the feed-forward part is gated, as LLaMA's is; the others are OPT's."""
    kv_heads: int | None = None
    """Key and value heads; null: as many as query heads."""


SHAPES = {
    "embedded": Shape(128, 512, 4, gated=False),
    "opt-125m": Shape(768, 3072, 12, gated=False),
    "opt-1.3b": Shape(2048, 8192, 32, gated=False),
    "opt-6.7b": Shape(4096, 16384, 32, gated=False),
    "smollm2-135m": Shape(576, 1536, 9, gated=True, kv_heads=3),
    "tinyllama-1.1b": Shape(2048, 5632, 32, gated=True, kv_heads=4),
    "llama-7b": Shape(4096, 11008, 32, gated=True),
    "llama-30b": Shape(6656, 17920, 52, gated=True),
}
SHARED_DIRECTIONS = 64


@dataclass(frozen=True)
class Problem:
    """Holds one projection."""

    name: str
    W: Tensor
    """Weight ``[heads, rows, columns]``."""
    H: Tensor
    G: Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        """Return the rows of all heads, and the columns."""
        return self.W.shape[0] * self.W.shape[1], self.W.shape[2]


def problems(model: str, rows: int | None, device: torch.device) -> Iterator[Problem]:
    """Yield the projections of a block; with ``rows`` at most so many of each (whole heads)."""
    for name, (all_heads, head_rows, columns, kind) in _projections(model).items():
        heads, size = all_heads, head_rows
        if rows is not None:
            heads = max(1, min(heads, rows // size)) if kind != "H" else 1
            size = min(size, rows)
        W = 0.02 * torch.randn(heads, size, columns, device=device)
        H = torch.stack([hessian(columns, device) for _ in range(heads if kind == "H_V" else 1)])
        G = None
        if kind == "G":
            K = torch.randn(heads, 4 * size, size, device=device)
            G = K.mT @ K / (4 * size)
        yield Problem(name, W, H, G)


def hessian(columns: int, device: torch.device) -> Tensor:
    """Return a damped Hessian whose variances fall as ``1 / j``, half of each in a few directions."""
    variances = columns / torch.arange(1, columns + 1, device=device)[torch.randperm(columns)]
    A = torch.randn(columns, SHARED_DIRECTIONS, device=device) / SHARED_DIRECTIONS**0.5
    H: Tensor = 0.5 * variances.sqrt()[:, None] * (A @ A.T) * variances.sqrt()
    H.diagonal().add_(0.5 * variances + 0.01 * variances.mean())
    return H


def config(
    shape: Shape, length: int, blocks: int = 1, vocabulary: int = 64, experts: int = 0
) -> PreTrainedConfig:
    """Return the configuration of a model; with ``experts`` it is a mixture of so many in each block."""
    options: dict[str, Any] = {
        "hidden_size": shape.hidden, "num_attention_heads": shape.heads, "num_hidden_layers": blocks,
        "vocab_size": vocabulary, "max_position_embeddings": length,
    }  # fmt: skip
    if not shape.gated:
        return OPTConfig(ffn_dim=shape.wide, word_embed_proj_dim=shape.hidden, **options)
    options |= {"intermediate_size": shape.wide, "num_key_value_heads": shape.kv_heads or shape.heads}
    if experts:
        return Qwen3MoeConfig(num_experts=experts, moe_intermediate_size=shape.wide, **options)
    return LlamaConfig(**options)


def _projections(model: str) -> dict[str, tuple[int, int, int, str]]:
    """Return heads, rows of a head, columns and the kind of objective of each projection."""
    hidden, wide, heads, gated, kv_heads = SHAPES[model]
    head, kv_heads = hidden // heads, kv_heads or heads
    found = {
        "q_proj": (heads, head, hidden, "G"),
        "k_proj": (kv_heads, head, hidden, "G"),
        "v_proj": (kv_heads, head, hidden, "H_V"),
        "out_proj": (1, hidden, hidden, "H"),
    }
    if gated:
        names = {"gate_proj": (1, wide, hidden, "H"), "up_proj": (1, wide, hidden, "H")}
        return {**found, **names, "down_proj": (1, hidden, wide, "H")}
    return {**found, "fc1": (1, wide, hidden, "H"), "fc2": (1, hidden, wide, "H")}
