"""Models of the LLaMA type with a mixture of experts in their blocks, but for those with linear attention.

A router chooses k experts for each token, and the output is the sum of theirs, with the weights that the
router gives them. The router keeps its precision. Some add the output of a shared expert. Qwen2-MoE
multiplies it by the sigmoid of a linear layer with one output, which keeps its precision as well.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from aespa_pl.errors import UserError
from aespa_pl.models.experts import Expert, ExpertMixture, Fused, Gated, Part, dense_blocks, taken_apart
from aespa_pl.models.family import BlockLayout, FoldIntoNorm, FoldIntoRows, InputGroup, Projection
from aespa_pl.models.lfm2 import Lfm2Family
from aespa_pl.models.llama import LlamaFamily
from aespa_pl.models.relatives import ErnieFamily, HunyuanFamily

W123 = {".gate_proj.": ".w1.", ".down_proj.": ".w2.", ".up_proj.": ".w3."}
"""Names that some files have for the matrices of an expert."""


class MixtureFamily(LlamaFamily):
    """Adapts models of the LLaMA type whose blocks have experts."""

    fused: ClassVar = Fused()
    """How transformers keeps the experts in memory."""
    router: ClassVar = "gate"
    """Name of the module that routes tokens."""
    router_layer: ClassVar = "gate"
    """Path of what holds its weight."""
    shared: ClassVar[str | None] = None
    """Name of the shared expert, where a configuration may have one."""
    shared_gate: ClassVar[str | None] = None
    """Name of its gate."""
    joins_experts: ClassVar = False
    """Whether files have all experts of a block in one tensor; else those that do are read as well."""
    linear_in_up: ClassVar = True
    """Whether a factor of an output of up is one of an input of down."""

    renamed: ClassVar[Mapping[str, str]] = {}
    """What parts of the names of tensors are in files, where they are others."""

    def has_experts(self, config: PreTrainedConfig, index: int) -> bool:
        """Return whether a block has experts; the others, often the first, are dense."""
        return index >= dense_blocks(config)

    def has_shared(self, config: PreTrainedConfig) -> bool:
        """Return whether blocks with experts have a shared one."""
        return self.shared is not None

    def layout(self, config: PreTrainedConfig, index: int = 0) -> BlockLayout:
        """Return the projections of a block: the attention's, and those of all experts."""
        dense = super().layout(config, index)
        return self.with_experts(config, dense, index) if self.has_experts(config, index) else dense

    def with_experts(self, config: PreTrainedConfig, dense: BlockLayout, index: int) -> BlockLayout:
        """Return the layout of a block that has experts in the place of a dense network."""
        mlp, residual = self.mlp[0], self.starts[1]
        count = int(getattr(config, "num_experts", None) or config.num_local_experts)
        stated = config.num_experts_per_tok
        chosen = int(stated if isinstance(stated, int) else stated[index])
        paths, factor = (mlp, f"{mlp}.{self.router}", f"{mlp}.experts"), self.residual_factor(config)
        mixture = ExpertMixture(*paths, count, chosen, residual, residual_factor=factor)
        if self.has_shared(config):
            gate = None if self.shared_gate is None else f"{mlp}.{self.shared_gate}"
            mixture = replace(mixture, shared=f"{mlp}.{self.shared}", shared_gate=gate)
        groups = (*dense.groups[:2], *self.expert_groups(mixture))
        return replace(dense, groups=groups, mixture=mixture)

    def expert_groups(self, mixture: ExpertMixture) -> Iterator[InputGroup]:
        """Yield the groups of a mixture's experts: one input for gate and up of all, one for each down.

        All experts share the zeta of their input, because it is folded into one norm.
        """
        paths = {f"expert_{number}": f"{mixture.experts}.{number}" for number in range(mixture.count)}
        norm = mixture.input_norm or mixture.residual
        # a norm that the experts alone have is not read by the router
        readers = () if mixture.input_norm else (f"{mixture.module}.{self.router_layer}",)
        if mixture.shared is not None:
            paths["shared_expert"] = mixture.shared
        if mixture.shared_gate is not None:
            readers = (*readers, mixture.shared_gate)
        ups = tuple(
            Projection(f"{name}_{kind}_proj", f"{path}.{kind}_proj", expert=number)
            for number, (name, path) in enumerate(paths.items())
            for kind in ("gate", "up")
        )
        group = "experts_input" if mixture.input_norm else "mlp_input"
        yield InputGroup(group, ups, FoldIntoNorm(norm, self.norm_offset, readers))
        for number, (name, path) in enumerate(paths.items()):
            rows = FoldIntoRows(f"{name}_up_proj") if self.linear_in_up else None
            down = Projection(
                f"{name}_down_proj",
                f"{path}.down_proj",
                residual=mixture.residual,
                norms=mixture.norms,
                residual_factor=mixture.residual_factor,
                expert=number,
            )
            yield InputGroup(f"{name}_hidden", (down,), rows)

    def places(self, name: str) -> tuple[tuple[str, Part | None], ...]:
        """Return the tensor's name in files, its own, and that of the tensor of all experts."""
        whole, place = self.fused.places(name), name
        if whole and self.joins_experts:
            return whole
        for part, other in self.renamed.items():
            place = place.replace(part, other)
        return (*((each, None) for each in dict.fromkeys((place, name))), *whole)

    def unfuse(self, model: PreTrainedModel) -> None:
        """Give every expert linear layers of its own."""
        blocks: Any = model.get_submodule(self.blocks_path)
        for index, block in enumerate(blocks):
            if self.has_experts(model.config, index):
                mixture = block.get_submodule(self.mlp[0])
                gated = self.gated(mixture.experts)
                mixture.experts = taken_apart(mixture.experts, self.fused, gated)
                if self.has_shared(model.config):
                    whole = mixture.get_submodule(self.shared)
                    expert = Expert(whole.gate_proj, whole.up_proj, whole.down_proj, gated)
                    mixture.set_submodule(self.shared, expert)

    def gated(self, fused: Any) -> Gated:
        """Return what joins the outputs of gate and up in the library's module of experts."""
        activation: nn.Module = fused.act_fn
        return lambda gate, up: activation(gate) * up


class Qwen3MoeFamily(MixtureFamily):
    """Adapts Qwen2-MoE, which has a shared expert, and Qwen3-MoE, which has none."""

    title = "Qwen2-MoE, Qwen3-MoE"
    model_types: ClassVar[tuple[str, ...]] = ("qwen2_moe", "qwen3_moe")
    shared = "shared_expert"
    shared_gate = "shared_expert_gate"

    def has_experts(self, config: PreTrainedConfig, index: int) -> bool:
        """Return whether a block has experts; configurations may leave some blocks dense."""
        sparse = config.num_experts > 0 and (index + 1) % config.decoder_sparse_step == 0
        return sparse and index not in config.mlp_only_layers

    def has_shared(self, config: PreTrainedConfig) -> bool:
        """Return whether blocks with experts have a shared one."""
        return hasattr(config, "shared_expert_intermediate_size")


class OlmoeFamily(MixtureFamily):
    """Adapts OLMoE, whose norms of queries and keys run over all heads together."""

    title = "OLMoE"
    model_types = ("olmoe",)

    def check(self, config: PreTrainedConfig) -> None:
        """Refuse clamped queries, keys and values, and what every family refuses."""
        if config.clip_qkv is not None:
            raise UserError(
                f"model.pretrained: clamped queries, keys and values (clip_qkv {config.clip_qkv} in "
                "config.json) can't be quantized: give an OLMoE without"
            )
        super().check(config)


class Glm4MoeFamily(MixtureFamily):
    """Adapts GLM-4.5 to 4.7 but for Flash, with a shared expert behind the first, dense blocks.

    The router chooses experts by the sigmoid of its logits and a correction, and weights them without it.
    """

    title = "GLM-4.5 to 4.7"
    model_types = ("glm4_moe",)
    shared = "shared_experts"
    exact = ("e_score_correction_bias",)


class ErnieMoeFamily(MixtureFamily, ErnieFamily):
    """Adapts ERNIE 4.5 with experts, whose router has a correction as GLM-4.5's."""

    title = "ERNIE 4.5 (experts)"
    model_types = ("ernie4_5_moe",)
    shared = "shared_experts"
    exact = ("e_score_correction_bias", "mlp.gate.weight")
    renamed: ClassVar = {".gate.moe_statics.": ".moe_statics."}

    def has_experts(self, config: PreTrainedConfig, index: int) -> bool:
        """Return whether a block has experts; the last may be dense as well, and some between."""
        inside = super().has_experts(config, index) and index <= config.moe_layer_end_index
        return inside and (index + 1) % int(config.moe_layer_interval) == 0

    def has_shared(self, config: PreTrainedConfig) -> bool:
        """Return whether blocks with experts have a shared one; several are one matrix."""
        return bool(config.moe_num_shared_experts)


class HunyuanMoeFamily(MixtureFamily, HunyuanFamily):
    """Adapts Hunyuan with experts and a shared one."""

    title = "Hunyuan (experts)"
    model_types = ("hunyuan_v1_moe",)
    router_layer = "gate.wg"
    shared = "shared_mlp"
    exact = ("gate.wg.weight",)


class Lfm2MoeFamily(MixtureFamily, Lfm2Family):
    """Adapts LFM2 with experts behind the first, dense blocks; the router has a correction as GLM-4.5's."""

    title = "LFM2 (experts)"
    model_types = ("lfm2_moe",)
    rotary = "pos_emb"
    exact = ("expert_bias",)
    renamed: ClassVar = W123


class MixtralFamily(MixtureFamily):
    """Adapts Mixtral, whose files have other names than the library's modules."""

    title = "Mixtral"
    model_types: ClassVar[tuple[str, ...]] = ("mixtral",)
    renamed: ClassVar = {".mlp.": ".block_sparse_moe.", **W123}


class MiniMaxFamily(MixtralFamily):
    """Adapts MiniMax M2, whose norms of queries and keys run over all heads together.

    The router has sigmoids, and a correction as GLM-4.5's; RoPE turns a part of each head.
    """

    title = "MiniMax M2"
    model_types = ("minimax_m2",)
    exact = ("e_score_correction_bias",)


class GptOssFamily(MixtureFamily):
    """Adapts gpt-oss: experts with biases and a clamped activation, and sinks beside the attention's scores.

    Its files hold all experts in one tensor, columns first, with the rows of gate and up in turn. Published
    models have their experts in MXFP4; only copies in bfloat16 can be quantized.
    """

    title = "gpt-oss"
    model_types = ("gpt_oss",)
    fused: ClassVar = Fused(interleaved=True, transposed=True)
    router = router_layer = "router"
    half_rotations = True
    joins_experts: ClassVar = True
    linear_in_up: ClassVar = False  # up is clamped, and 1 is added to it

    def forms_probabilities(self, config: PreTrainedConfig) -> bool:
        """Return True, because no fused kernel has sinks."""
        return True

    def check(self, config: PreTrainedConfig) -> None:
        """Refuse experts in MXFP4, and what every family refuses."""
        other = getattr(config, "quantization_config", None)
        if isinstance(other, dict) and other.get("quant_method") == "mxfp4":
            raise UserError(
                "model.pretrained: its experts are in MXFP4 already: give a copy in bfloat16, such as "
                "transformers saves after loading with Mxfp4Config(dequantize=True)"
            )
        super().check(config)

    def gated(self, fused: Any) -> Gated:
        """Return what joins the outputs of gate and up."""
        limit, alpha = float(fused.limit), float(fused.alpha)

        def gated(gate: Tensor, up: Tensor) -> Tensor:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return (up + 1) * (gate * (gate * alpha).sigmoid())

        return gated
