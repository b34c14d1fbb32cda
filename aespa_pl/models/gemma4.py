"""Gemma 4: blocks with full attention have wider heads than others, and their keys may be values as well.

Values pass a norm without a weight before they are mixed over positions, and each block ends with a factor.
26B has experts beside the dense network of each block. Either has norms of its own before and behind it, and
their sum passes another.

E2B and E4B have a small network at the end of each block, which takes an embedding of its own for each token.
Their last blocks have no keys and values, but take those of the last block of their kind that has some. Both
travel with the hidden states: a stream is ``[h | K V of each kind | embeddings of the blocks to come]``.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedConfig, PreTrainedModel

from aespa_pl.models.block_kinds import FULL, attention_kinds
from aespa_pl.models.experts import ExpertMixture, taken_apart
from aespa_pl.models.family import PER_LAYER, PER_LAYER_EMBEDDING, BlockLayout, InputGroup, Projection, Role
from aespa_pl.models.moe import MixtureFamily
from aespa_pl.models.observed import Observer
from aespa_pl.models.relatives import AFTER, Gemma3Family

GATE, PROJECTION, NORM = "per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"
"""Layers of the network that takes embeddings of its own."""
OWN_KEYS = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:k_proj|v_proj|k_norm)\.(?:weight|bias)")
"""The names of what a block that borrows keys and values does not have."""


class Gemma4Family(MixtureFamily, Gemma3Family):
    """Adapts the models of Gemma 4."""

    title = "Gemma 4"
    model_types = ("gemma4_text", "gemma4_unified_text")
    norm_offset = 0.0
    joins_experts = True

    def sees_later(self, config: PreTrainedConfig) -> bool:
        """Return whether tokens of text see those after them; tokens of images may."""
        return bool(config.use_bidirectional_attention == "all")

    def has_experts(self, config: PreTrainedConfig, index: int) -> bool:
        """Return whether the blocks have experts."""
        return bool(getattr(config, "enable_moe_block", False))  # unified configurations have none

    def layout(self, config: PreTrainedConfig, index: int = 0) -> BlockLayout:
        """Return the projections of a block, whose kind of attention decides on its heads."""
        own: Any = config.per_layer_config[index]
        layout = super().layout(own, index)
        inputs, output, *mlp = layout.groups
        output = replace(output, fold=None)  # a norm stands between the rows of V and what is mixed
        borrows = config.kv_sharing_modes[index] == "reuse"
        if borrows:
            inputs = replace(inputs, projections=inputs.projections[:1])
        elif config.attention_k_eq_v and attention_kinds(config)[index] == FULL:
            query, key, _ = inputs.projections
            inputs = replace(inputs, projections=(query, replace(key, role=Role.VALUE)))
        if width_of_inputs(config):
            last = Projection(PROJECTION, PROJECTION, residual=GATE, norms=(NORM,))
            each = zip(PER_LAYER, (Projection(GATE, GATE), last), strict=True)
            mlp += [InputGroup(name, (projection,), fold=None) for name, projection in each]
        groups = (inputs, output, *mlp)
        return replace(layout, groups=groups, values_normed=not borrows, borrows_keys=borrows)

    def with_experts(self, config: PreTrainedConfig, dense: BlockLayout, index: int) -> BlockLayout:
        """Return the layout of a block that has experts beside the dense network."""
        first, second = ((f"{AFTER[1]}_{i}", AFTER[1]) for i in (1, 2))
        mixture = ExpertMixture(
            "experts",
            "router",
            "experts",
            config.num_experts,
            config.top_k_experts,
            residual=self.starts[1],
            input_norm=f"{self.starts[1]}_2",
            norms=second,
        )
        *groups, last = dense.groups
        down = replace(last.projections[0], norms=first)
        groups = [*groups, replace(last, projections=(down,)), *self.expert_groups(mixture)]
        return replace(dense, groups=tuple(groups), mixture=mixture)

    def unfuse(self, model: PreTrainedModel) -> None:
        """Give every expert linear layers of its own."""
        blocks: Any = model.get_submodule(self.blocks_path)
        for block in blocks if self.has_experts(model.config, 0) else ():
            block.experts = taken_apart(block.experts, self.fused, self.gated(block.experts))

    def ignores(self, config: PreTrainedConfig, name: str) -> bool:
        """Return whether a tensor is of keys and values that a block borrows; files may have them."""
        found, modes = OWN_KEYS.fullmatch(name), config.kv_sharing_modes
        # files may have more blocks than the configuration
        return found is not None and modes[int(found[1]) : int(found[1]) + 1] == ["reuse"]

    def restore_buffers(self, model: PreTrainedModel, device: torch.device) -> None:
        """Compute RoPE's frequencies, and the factors of the embeddings."""
        super().restore_buffers(model, device)
        for path in self.other_embeddings(model.config).values():
            known = cast(Any, model.get_submodule(path))
            known.embed_scale = torch.tensor(known.scalar_embed_scale, device=device)

    def other_embeddings(self, config: PreTrainedConfig) -> dict[str, str]:
        """Return the embeddings that the blocks take."""
        return {PER_LAYER_EMBEDDING: "model.embed_tokens_per_layer"} if width_of_inputs(config) else {}

    def stream_width(self, config: PreTrainedConfig) -> int:
        """Return the columns of hidden states, borrowed keys and values, and embeddings of all blocks."""
        inputs = config.num_hidden_layers * width_of_inputs(config)
        return int(config.hidden_size + borrowed_columns(config) + inputs)

    def embed(self, model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, Mapping[str, Any]]:
        """Embed the tokens for the first block, and for each block what it takes by itself."""
        hidden, arguments = super().embed(model, ids)
        parts = [hidden, hidden.new_zeros(*hidden.shape[:2], borrowed_columns(model.config))]
        if width_of_inputs(model.config):
            base, count = model.model, model.config.num_hidden_layers
            table = base.embed_tokens_per_layer  # perhaps on disk
            rows = embedding(ids.to(table.weight.device), table.weight, sparse=table.sparse)
            rows = rows.to(hidden) * table.embed_scale.to(hidden.dtype)
            inputs = base.project_per_layer_inputs(hidden, rows.unflatten(-1, (count, -1)))
            parts.append(inputs.flatten(2))
        return torch.cat(parts, -1), arguments

    def run_block(self, block: nn.Module, hidden: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        """Run one block; its own embedding is no more in the stream that it returns."""
        attention: Any = block.get_submodule("self_attn")
        config = attention.config
        heads, taken = borrowed_heads(config), width_of_inputs(config)
        if not heads and not taken:
            return super().run_block(block, hidden, arguments)
        pairs = [of_kind for of_kind in heads.values() for _ in "KV"]
        sizes = [config.hidden_size, *(count * size for count, size in pairs), taken]
        states, *flat, own, later = hidden.split([*sizes, hidden.shape[-1] - sum(sizes)], -1)
        # [B, n_kv, L, d_h] each
        borrowed = [x.unflatten(-1, of).transpose(1, 2) for x, of in zip(flat, pairs, strict=True)]
        known = dict(zip(heads, zip(borrowed[::2], borrowed[1::2], strict=True), strict=True))
        kind = attention_kinds(config)[attention.layer_idx]
        inputs = {"per_layer_input": own} if taken else {}
        output = block(states, shared_kv_states=known, **inputs, **arguments[kind])
        kept = [x.transpose(1, 2).flatten(2) for kind in heads for x in known[kind]]
        return torch.cat((output, *kept, later), -1)

    def head(self, model: PreTrainedModel, hidden: Tensor) -> Tensor:
        """Run final norm and head of the hidden states in a stream."""
        return super().head(model, hidden[..., : model.config.hidden_size])

    @contextmanager
    def observe_attention(self, model: PreTrainedModel, block: nn.Module, report: Observer) -> Iterator[None]:
        """Call ``report`` for each batch, with what the norm divides values by."""
        seen: dict[str, Any] = {}
        attention: Any = block.get_submodule("self_attn")

        def keep_scale(_module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
            heads = output.unflatten(-1, (-1, attention.head_dim)).float()  # [B, L, n_kv, d_h]
            inverse = (heads.square().mean(-1) + attention.v_norm.eps).rsqrt()
            seen["value_inverse"] = inverse.transpose(1, 2)

        if attention.is_kv_shared_layer:
            with super().observe_attention(model, block, report):
                yield
            return
        values = attention.k_proj if attention.v_proj is None else attention.v_proj
        with (
            values.register_forward_hook(keep_scale),
            super().observe_attention(model, block, lambda a: report(replace(a, **seen))),
        ):
            yield


def width_of_inputs(config: PreTrainedConfig) -> int:
    """Return the columns of the embedding that each block takes; 0 where it takes none."""
    return int(getattr(config, "hidden_size_per_layer_input", None) or 0)


def borrowed_heads(config: PreTrainedConfig) -> dict[str, tuple[int, int]]:
    """Return number and size of the key heads that later blocks borrow, by their kind; empty: none do."""
    kinds = attention_kinds(config) if config.num_kv_shared_layers else ()
    each = {kind: config.per_layer_config[kinds.index(kind)] for kind in sorted(set(kinds))}
    return {kind: (own.num_key_value_heads, own.head_dim) for kind, own in each.items()}


def borrowed_columns(config: PreTrainedConfig) -> int:
    """Return the columns of all keys and values that later blocks borrow."""
    return 2 * sum(heads * size for heads, size in borrowed_heads(config).values())
