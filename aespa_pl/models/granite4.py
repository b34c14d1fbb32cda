"""Granite 3 with experts, and Granite 4.

Granite 4 mixes blocks of attention with blocks of Mamba 2, or has attention alone; some have experts.

The input projection of a Mamba block has the rows of its gate, of what is convolved and of the time steps.
Both projections are plain linear layers, and all that rules the state keeps its precision (convolution,
decay, bias of the steps, skip and norm). The library has experts and a shared one side by side in a block.
Here they are one module, whose output is the sum.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_recurrent_attention_mask

from aespa_pl.models.block_kinds import FULL, LINEAR, attention_kinds
from aespa_pl.models.experts import Expert, Experts, Part, linear, taken_apart
from aespa_pl.models.family import BlockLayout, FoldIntoNorm
from aespa_pl.models.moe import MixtureFamily
from aespa_pl.models.relatives import GraniteFamily

MLP, MOE = "shared_mlp", "block_sparse_moe"
OF_MIXTURE = {
    "router.weight": "router.layer.weight",
    "experts.gate_up_proj": "input_linear.weight",
    "experts.down_proj": "output_linear.weight",
}
"""Names in files of what a mixture of experts has."""
PLACES = {
    **{f"{MLP}.{name}": f"{MOE}.{place}" for name, place in OF_MIXTURE.items()},
    f"{MLP}.shared.gate_proj.weight": f"{MLP}.input_linear.weight",
    f"{MLP}.shared.up_proj.weight": f"{MLP}.input_linear.weight",
    f"{MLP}.shared.down_proj.weight": f"{MLP}.output_linear.weight",
}
"""Names in files of what a block of Granite 4 with experts has."""
JOINED = ("gate_proj.weight", "up_proj.weight")
"""Matrices of the shared expert whose rows follow one another in files."""


class GraniteMoeFamily(MixtureFamily, GraniteFamily):
    """Adapts Granite 3 with experts, whose files have all experts of a block in two tensors."""

    title = "Granite 3 (experts)"
    model_types = ("granitemoe",)
    mlp = (MOE, "gate_proj", "up_proj", "down_proj")
    router = router_layer = "router"
    joins_experts = True

    def places(self, name: str) -> tuple[tuple[str, Part | None], ...]:
        """Return the names in files."""
        ((place, part),) = super().places(name)
        prefix, found, rest = place.rpartition(f"{MOE}.")
        return ((prefix + found + OF_MIXTURE.get(rest, rest), part),)


class Granite4Family(MixtureFamily, GraniteFamily):
    """Adapts Granite 4: without experts gate and up are one matrix, and its attention may have no RoPE."""

    title = "Granite 4"
    model_types = ("granitemoehybrid",)
    mlp = (MLP, "gate_proj", "up_proj", "output_linear")
    fused_mlp = "input_linear"
    router = router_layer = "router"
    shared = "shared"
    masks: ClassVar = {FULL: create_causal_mask, LINEAR: create_recurrent_attention_mask}

    def has_experts(self, config: PreTrainedConfig, index: int) -> bool:
        """Return whether the blocks have experts."""
        return bool(config.num_local_experts)

    def unfuse(self, model: PreTrainedModel) -> None:
        """Make one module of a block's experts and of the shared one, each with linear layers of its own."""
        blocks: Any = model.get_submodule(self.blocks_path)
        for block in blocks if self.has_experts(model.config, 0) else ():
            of_router, of_all = block.block_sparse_moe, block.shared_mlp
            gated = self.gated(of_router.experts)
            gate, up = map(linear, of_all.input_linear.weight.chunk(2))
            shared = Expert(gate, up, of_all.output_linear, gated)
            experts = taken_apart(of_router.experts, self.fused, gated)
            block.shared_mlp = _Mixture(of_router.router, experts, shared)
            block.block_sparse_moe, block.has_experts = None, False

    def places(self, name: str) -> tuple[tuple[str, Part | None], ...]:
        """Return the names in files, which have all experts of a block in two tensors."""
        _, found, layer = name.rpartition(f".{MLP}.shared.")
        part = Part(None, JOINED.index(layer), len(JOINED)) if found and layer in JOINED else None
        ((place, part),) = self.fused.places(name) or ((name, part),)
        prefix, found, rest = place.rpartition(f"{MLP}.")
        return ((prefix + PLACES.get(found + rest, found + rest), part),)

    def layout(self, config: PreTrainedConfig, index: int = 0) -> BlockLayout:
        """Return the projections of a block of either kind."""
        attention = super().layout(config, index)
        if attention_kinds(config)[index] != LINEAR:
            return attention
        names = ("mamba.in_proj", "mamba.out_proj")
        return self.without_attention(config, attention, names, FoldIntoNorm("mamba.norm"))

    def mlp_width(self, config: PreTrainedConfig) -> int:
        """Return the rows of gate, and of up."""
        return int(config.shared_intermediate_size)

    def rotates(self, attention: nn.Module) -> bool:
        """Return whether the attention has RoPE."""
        return bool(cast(Any, attention).config.position_embedding_type == "rope")

    def restore_buffers(self, model: PreTrainedModel, device: torch.device) -> None:
        """Compute RoPE's frequencies, where there is RoPE."""
        if model.model.rotary_emb is not None:
            super().restore_buffers(model, device)

    def rotations(self, model: PreTrainedModel, hidden: Tensor, positions: Tensor, kind: str) -> Any:
        """Return cos and sin, or None without RoPE."""
        if model.model.rotary_emb is None:
            return None
        return super().rotations(model, hidden, positions, kind)

    def run_block(self, block: nn.Module, hidden: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        """Run one block, with the arguments of its kind."""
        return cast(Tensor, block(hidden, **arguments[cast(str, block.block_type)]))


class _Mixture(nn.Module):
    """Runs the experts that a router chooses, and the shared one."""

    def __init__(self, router: nn.Module, experts: Experts, shared: Expert) -> None:
        super().__init__()
        self.router, self.experts, self.shared = router, experts, shared

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the sum of their outputs ``[B, L, d]`` of the tokens ``[B, L, d]``."""
        flat = hidden.flatten(0, 1)
        _, scores, indices = self.router(flat)
        return cast(Tensor, self.experts(flat, indices, scores).view_as(hidden) + self.shared(hidden))
