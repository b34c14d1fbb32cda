"""Qwen2-MoE, Qwen3-MoE and Mixtral are of the LLaMA type, with a mixture of experts in their blocks.

A router chooses k experts for each token, and the output is the sum of theirs, weighted by the router's
probabilities. The router keeps its precision. Qwen2-MoE adds the output of a shared expert, multiplied by the
sigmoid of a linear layer with one output, which keeps its precision as well.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from aespa_pl.models.experts import Expert, expert_groups, taken_apart
from aespa_pl.models.family import BlockLayout, FoldIntoNorm
from aespa_pl.models.llama import LlamaFamily
from aespa_pl.models.parts import NAME, ExpertMixture, Fused, Part


class MixtureFamily(LlamaFamily):
    """Adapts models of the LLaMA type whose blocks have experts."""

    fused: ClassVar = Fused()
    """How transformers keeps the experts in memory."""
    router: ClassVar = "mlp.gate"
    linear_in_up: ClassVar = True
    """Whether a factor of an output of up is one of an input of down."""

    def has_experts(self, config: PreTrainedConfig, index: int) -> bool:
        """Return whether a block has experts; the others are dense."""
        return True

    def experts_of(self, config: PreTrainedConfig) -> int:
        """Return the number of experts of a block."""
        return int(config.num_local_experts)

    def layout(self, config: PreTrainedConfig, index: int = 0) -> BlockLayout:
        """Return the projections of a block: the attention's, and those of all experts."""
        dense = super().layout(config, index)
        if not self.has_experts(config, index):
            return dense
        norm, readers, shared = "post_attention_layernorm", [self.router], None
        count, chosen = self.experts_of(config), int(config.num_experts_per_tok)
        mixture = ExpertMixture("mlp", self.router, "mlp.experts", count, chosen, residual=norm)
        if hasattr(config, "shared_expert_intermediate_size"):
            shared, gate = "mlp.shared_expert", "mlp.shared_expert_gate"
            mixture = replace(mixture, shared_gate=gate)
            readers.append(gate)
        fold = FoldIntoNorm(norm, self.norm_offset, tuple(readers))
        experts = expert_groups(mixture, fold, shared, linear_in_up=self.linear_in_up)
        groups = (*dense.groups[:2], *experts)
        return replace(dense, groups=groups, mixture=mixture)

    def unfuse(self, model: PreTrainedModel) -> None:
        """Give every expert linear layers of its own."""
        blocks: Any = model.get_submodule(self.blocks_path)
        for index, block in enumerate(blocks):
            if self.has_experts(model.config, index):
                fused = block.mlp.experts
                block.mlp.experts = taken_apart(fused, self.fused, self.gated(fused))
                if (shared := getattr(block.mlp, "shared_expert", None)) is not None:
                    layers = (shared.gate_proj, shared.up_proj, shared.down_proj)
                    block.mlp.shared_expert = Expert(*layers, self.gated(shared))

    def gated(self, fused: Any) -> Callable[[Tensor, Tensor], Tensor]:
        """Return what joins the outputs of gate and up in the library's module of experts."""
        activation: nn.Module = fused.act_fn
        return lambda gate, up: activation(gate) * up


class Qwen3MoeFamily(MixtureFamily):
    """Adapts Qwen2-MoE, which has a shared expert, and Qwen3-MoE, which has none."""

    title = "Qwen2-MoE, Qwen3-MoE"
    model_types: ClassVar[tuple[str, ...]] = ("qwen2_moe", "qwen3_moe")

    def has_experts(self, config: PreTrainedConfig, index: int) -> bool:
        """Return whether a block has experts; configurations may leave some blocks dense."""
        sparse = config.num_experts > 0 and (index + 1) % config.decoder_sparse_step == 0
        return sparse and index not in config.mlp_only_layers

    def experts_of(self, config: PreTrainedConfig) -> int:
        """Return the number of experts of a block."""
        return int(config.num_experts)

    def places(self, name: str) -> tuple[tuple[str, Part | None], ...]:
        """Return the tensor's own name; files that hold all experts in one tensor are read as well."""
        own: tuple[tuple[str, Part | None], ...] = ((name, None),)
        return (*own, self.fused.place_of(name)) if NAME.fullmatch(name) else own


class MixtralFamily(MixtureFamily):
    """Adapts Mixtral, whose files have other names than the library's modules."""

    title = "Mixtral"
    model_types = ("mixtral",)

    def places(self, name: str) -> tuple[tuple[str, Part | None], ...]:
        """Return the names in files."""
        place = name.replace(".mlp.", ".block_sparse_moe.")
        if NAME.fullmatch(name):
            for layer, number in (("gate", 1), ("down", 2), ("up", 3)):
                place = place.replace(f".{layer}_proj.", f".w{number}.")
            return ((place, None), self.fused.place_of(name))
        return ((place, None), (name, None))
