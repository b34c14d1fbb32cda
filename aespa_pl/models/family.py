"""Define what the rest of the package knows about a model family.

Notation: B batch of segments, L tokens of a segment, d hidden size, n_h query heads, n_kv key/value
heads (n_kv divides n_h), d_h head size.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from aespa_pl.errors import UserError
from aespa_pl.models.experts import ExpertMixture, Part, joined
from aespa_pl.models.observed import Observer


class Role(StrEnum):
    """Names the job of a projection in its block, which decides its objective (Table 4 of the paper)."""

    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    OTHER = "other"


QKV = (Role.QUERY, Role.KEY, Role.VALUE)
PER_LAYER = ("per_layer_input", "per_layer_hidden")
"""Names of the groups of a network behind the feed-forward one, which takes embeddings of its own."""
PER_LAYER_EMBEDDING = "per_layer_embedding"
"""Name of the table of these embeddings, for all blocks side by side."""


@dataclass(frozen=True)
class Projection:
    """Describes one weight matrix that is quantized."""

    name: str
    """Name in logs and artifacts, unique in its block: ``q_proj``, ``query``, ``fc1`` ..."""
    module: str
    """Path of the ``nn.Linear`` in the block that holds the matrix."""
    role: Role = Role.OTHER
    fused: tuple[int, int] = (0, 1)
    """``(i, n)``: the module holds n fused projections, its rows are ``[heads, n, d_head]``, and this is
    the i-th of them (BLOOM)."""
    rows: tuple[int, int] | None = None
    """Begin and end of the rows of the module that are this projection's (Phi-3); None: all."""
    residual: str | None = None
    """Path of the module whose input the output is added to; None where it is added to nothing."""
    residual_factor: float = 1.0
    """What the output is multiplied by before it is added (Granite)."""
    norms: tuple[str, ...] = ()
    """Paths of the norms that the output passes, in this order, before it is added (Gemma, OLMo)."""
    expert: int | None = None
    """Number of the expert that it is part of, which sees only the tokens that are routed to it."""
    kept: bool = False
    """Whether its weights stay as they are (``kept.py``)."""


@dataclass(frozen=True)
class FoldIntoNorm:
    """Says that zeta multiplies weight and bias of the normalization before."""

    module: str
    offset: float = 0.0
    """What the norm adds to its weight before it multiplies by it (Gemma: 1)."""
    readers: tuple[str, ...] = ()
    """Paths of modules that read its output as well and keep their precision, such as a router: zeta divides
    the columns of their weights."""


@dataclass(frozen=True)
class FoldIntoRows:
    """Says that zeta multiplies the rows, and the bias, of the projection before."""

    projection: str


Fold = FoldIntoNorm | FoldIntoRows | None
"""The operation that takes zeta; None where none can take it exactly."""


@dataclass(frozen=True)
class InputGroup:
    """Lists projections with the same input; they share its Hessian and, where allowed, zeta."""

    name: str
    projections: tuple[Projection, ...]
    fold: Fold

    @property
    def inputs(self) -> dict[str, tuple[Projection, ...]]:
        """Return the projections that share a Hessian, by name: the group's, or each expert's."""
        if len({p.expert for p in self.projections}) == 1:
            return {self.name: self.projections}
        found: dict[str, tuple[Projection, ...]] = {}
        for p in self.projections:
            name = self.name if p.expert is None else f"{self.name} of expert {p.expert}"
            found[name] = (*found.get(name, ()), p)
        return found


@dataclass(frozen=True)
class BlockLayout:
    """Lists the projections of one block, in the order of the forward pass."""

    groups: tuple[InputGroup, ...]
    """The first sees the hidden size, and is the input of the attention where there is one."""
    heads: int
    key_value_heads: int
    head_dim: int
    mixture: ExpertMixture | None = None
    """Mixture of experts; None where the block has none."""
    gated: bool = False
    """Whether each number of the attention's output is multiplied by a gate before it is projected."""
    values_normed: bool = False
    """Whether each value head passes a norm without a weight before it is mixed over positions."""
    borrows_keys: bool = False
    """Whether the attention has keys and values of an earlier block (Gemma 4 E2B and E4B)."""
    latent: bool = False
    """Whether the attention makes all queries, keys and values of short vectors (DeepSeek)."""

    @classmethod
    def of(cls, config: PreTrainedConfig, *groups: tuple[tuple[Projection, ...], Fold]) -> "BlockLayout":
        """Return the layout of a block with the projections and the fold of each of its four groups."""
        names = ("attention_input", "attention_output", "mlp_input", "mlp_hidden")
        heads = config.num_attention_heads
        return cls(
            tuple(InputGroup(name, *group) for name, group in zip(names, groups, strict=True)),
            heads,
            getattr(config, "num_key_value_heads", None) or heads,
            getattr(config, "head_dim", None) or config.hidden_size // heads,
        )

    def heads_of(self, role: Role) -> int:
        """Return the number of heads that the rows of a projection are split into; 1 where there are none."""
        return {Role.QUERY: self.heads, Role.OTHER: 1}.get(role, self.key_value_heads)

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Return the projections of the block that are quantized."""
        return tuple(p for group in self.groups for p in group.projections if not p.kept)

    def sides_of(self, residual: str) -> int:
        """Return the number of quantized outputs that are added to a stream: a dense network's, experts'."""
        return len({p.expert is None for p in self.projections if p.residual == residual}) or 1

    @property
    def attended_group(self) -> InputGroup | None:
        """Return the group whose input is the attention's output, heads side by side; None: no attention."""
        if self.borrows_keys:
            return self.groups[1]
        return next((group for group in self.groups if self.values_before(group) is not None), None)

    @property
    def quantizes_values(self) -> bool:
        """Tell whether the block has attention whose values are quantized, and are no keys as well."""
        found = {p.role for p in self.groups[0].projections if p.role is Role.KEY or not p.kept}
        return {Role.KEY, Role.VALUE} <= found

    def values_before(self, group: InputGroup) -> Projection | None:
        """Return the value projection whose rows, mixed over positions alone, a group sees; None for most.

        A gate may multiply each row in between.
        """
        for before, after in pairwise(self.groups):
            if after == group:
                return next((p for p in before.projections if p.role is Role.VALUE), None)
        return None


class Family(ABC):
    """Adapts one family. It has no state: each method takes the model, a block or the configuration."""

    title: ClassVar[str]
    """Names of the models in README's list."""
    model_types: ClassVar[tuple[str, ...]]
    """The ``config.model_type`` values that this family stands for."""
    blocks_path: ClassVar[str]
    """Path of the list of blocks in the causal-LM model."""
    needs_bos: ClassVar[bool] = False
    """Whether the models are not meant to run on text that does not begin with BOS."""
    exact: ClassVar[tuple[str, ...]] = ()
    """What the names of tensors end with that are float32 at least, whatever type a model runs in."""

    def block_prefix(self, index: int) -> str:
        """Return what the names of a block's tensors begin with, such as ``model.layers.3.``."""
        return f"{self.blocks_path}.{index}."

    def check(self, config: PreTrainedConfig) -> None:
        """Raise UserError where the configuration of a model has parts that can't be quantized."""
        if getattr(config, "is_causal", True) is False:
            raise UserError(
                "model.pretrained: is_causal in config.json is false, so each token sees those after it: "
                "only models that predict the next token can be quantized"
            )
        other = getattr(config, "quantization_config", None)
        if other is not None:
            method = other.get("quant_method") if isinstance(other, dict) else None
            raise UserError(
                f"model.pretrained: already quantized ({method or 'quantization_config'} in "
                "config.json): give the model that it was made from, or a copy in bfloat16"
            )

    def unfuse(self, model: PreTrainedModel) -> None:  # noqa: B027
        """Give each matrix of a block a linear layer, where the library has many in one tensor."""

    def places(self, name: str) -> tuple[tuple[str, Part | None], ...]:
        """Return the names that a tensor of the model may have in files, each with the part that it is of it.

        The first is the one that is written. None: it is the whole tensor.
        """
        return ((name, None),)

    def as_stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors of the model, whole blocks of them, as files have them."""
        stored: dict[str, Tensor] = {}
        parts: dict[str, list[tuple[Part, Tensor]]] = {}
        for name, tensor in tensors.items():
            place, part = self.places(name)[0]
            if part is None:
                stored[place] = tensor
            else:
                parts.setdefault(place, []).append((part, tensor))
        return stored | {place: joined(pieces) for place, pieces in parts.items()}

    def positions(self, config: PreTrainedConfig) -> int | None:
        """Return the longest segment in tokens, or None where the model has no limit (ALiBi)."""
        return getattr(config, "max_position_embeddings", None)

    @abstractmethod
    def layout(self, config: PreTrainedConfig, index: int = 0) -> BlockLayout:
        """Return the projections of a block, given its number from 0."""

    def layouts(self, config: PreTrainedConfig) -> tuple[BlockLayout, ...]:
        """Return the layout of every block."""
        return tuple(self.layout(config, i) for i in range(int(config.num_hidden_layers)))

    def restore_buffers(self, model: PreTrainedModel, device: torch.device) -> None:  # noqa: B027
        """Compute the buffers outside the blocks that no file stores (RoPE's frequencies)."""

    def ignores(self, config: PreTrainedConfig, name: str) -> bool:
        """Return whether files may have a tensor that the library has no place for, and needs none."""
        return False

    def stream_width(self, config: PreTrainedConfig) -> int:
        """Return w: a stream before the first block has the hidden state and ``w - d`` numbers behind it."""
        return int(config.hidden_size)

    def forms_probabilities(self, config: PreTrainedConfig) -> bool:
        """Return whether the probabilities A take memory, because there is no fused kernel for a model."""
        return False

    def other_embeddings(self, config: PreTrainedConfig) -> dict[str, str]:
        """Return the paths of embeddings beside that of the hidden states, by their names in settings."""
        return {}

    @abstractmethod
    def embed(self, model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, Mapping[str, Any]]:
        """Run token ids ``[B, L]``, without padding, through the layers before the first block.

        It returns the stream ``[B, L, w]``, hidden states ``[B, L, d]`` in most families, and ``arguments``.
        """

    @abstractmethod
    def arguments(self, model: PreTrainedModel, hidden: Tensor) -> Mapping[str, Any]:
        """Return what ``run_block`` takes the keyword arguments of each block from (mask, rotations, ALiBi).

        Only shape, device and type of the hidden states matter. The mask depends on the attention
        in use: inside of ``observe_attention`` the arguments must be made inside of it as well.
        """

    def run_block(self, block: nn.Module, hidden: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        """Run one block with its own keyword arguments: stream to stream; d columns are its output."""
        return cast(Tensor, block(hidden, **arguments))

    @abstractmethod
    def head(self, model: PreTrainedModel, hidden: Tensor) -> Tensor:
        """Run the layers after the last block: a stream to logits ``[B, L, vocabulary]``."""

    @abstractmethod
    def observe_attention(
        self, model: PreTrainedModel, block: nn.Module, report: Observer
    ) -> AbstractContextManager[None]:
        """Call ``report`` with the block's queries and keys of each batch that runs in the context."""

    def norm_weights(self, block: nn.Module) -> tuple[Tensor, Tensor | None] | None:
        """Return what the norms on query and key heads multiply by, ``[heads or 1, d_h]``; None: no norms.

        A block that borrows keys has no norm for them.
        """
        return None
