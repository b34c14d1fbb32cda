"""LLaMA and its relatives have RoPE, RMSNorm, a gated feed-forward network, perhaps fewer key heads.

The relatives differ in details that are read from their configuration: biases, the head size, norms
on query and key heads (Qwen3), sliding windows in all or in some blocks (Mistral, Qwen2, Qwen3),
blocks without RoPE (SmolLM3), a factor of queries at far positions (Ministral 3). Families that place
or store their norms in another way are subclasses in files of their own.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from aespa_pl.errors import UserError
from aespa_pl.models.block_kinds import FULL, SLIDING, attention_kinds
from aespa_pl.models.family import (
    QKV,
    BlockLayout,
    Family,
    Fold,
    FoldIntoNorm,
    FoldIntoRows,
    InputGroup,
    Projection,
)
from aespa_pl.models.observed import Observer, Rotation, observed

MASKS = {FULL: create_causal_mask, SLIDING: create_sliding_window_causal_mask}


class LlamaFamily(Family):
    """Adapts models of LLaMA's structure, with and without grouped query heads."""

    title = "LLaMA 1 to 3, Mistral, Ministral 3, Qwen2, Qwen3, SmolLM3, Seed-OSS"
    model_types: ClassVar[tuple[str, ...]] = (
        "llama", "mistral", "ministral3", "qwen2", "qwen3", "smollm3", "seed_oss",
    )  # fmt: skip
    blocks_path = "model.layers"
    starts: ClassVar[tuple[str, str]] = ("input_layernorm", "post_attention_layernorm")
    """Paths of the modules that read the residual stream first, in attention and feed-forward network."""
    norms_before: ClassVar[bool] = True
    """Whether these are norms, which nothing but the projections reads."""
    output: ClassVar[str] = "o_proj"
    """Name of the attention's last projection."""
    mlp: ClassVar[tuple[str, str, str, str]] = ("mlp", "gate_proj", "up_proj", "down_proj")
    """Names of the feed-forward network and of its projections."""
    fused_mlp: ClassVar[str | None] = None
    """Name of the matrix that has the rows of its first two, where they are one."""
    final_norm: ClassVar[str] = "norm"
    """Name of the norm before the head."""
    norms_after: ClassVar[tuple[str | None, str | None]] = (None, None)
    """Paths of the norms that the outputs of attention and feed-forward network pass on their way."""
    rotary: ClassVar[str] = "rotary_emb"
    """Name of the module that makes RoPE's cos and sin."""
    half_rotations: ClassVar[bool] = False
    """Whether cos and sin have one column for each pair of columns that is rotated (gpt-oss)."""
    rotates_neighbours: ClassVar[bool] = False
    """Whether these pairs are neighbours, not halves of what is rotated."""
    head_norms: ClassVar[tuple[str, str]] = ("q_norm", "k_norm")
    """Names of the norms on query and key heads, where an attention has them."""
    rotates_before_norms: ClassVar[bool] = False
    """Whether RoPE comes before these norms."""
    norm_offset: ClassVar[float] = 0.0
    """What a norm adds to its weight."""
    masks: ClassVar[Mapping[str, Callable[..., Tensor | None]]] = MASKS
    """Function that makes the mask of each kind of block, by the kind's name in ``config.layer_types``."""

    def check(self, config: PreTrainedConfig) -> None:
        """Refuse a quantized model, and attention masks that the library would not make."""
        super().check(config)
        used, stated = attention_kinds(config), getattr(config, "layer_types", None)
        if unknown := sorted(set(used) - self.masks.keys()):
            raise UserError(
                f"model.pretrained: layer_types {', '.join(unknown)} in config.json is not "
                f"supported: expected {' or '.join(self.masks)}"
            )
        if stated is not None and tuple(stated) != used:
            raise UserError(
                f"model.pretrained: layer_types in config.json: transformers runs {used[0]} in "
                f"every block of a {config.model_type}, got {', '.join(sorted(set(stated)))}: "
                "correct layer_types or model_type"
            )

    def layout(self, config: PreTrainedConfig, index: int = 0) -> BlockLayout:
        """Return the projections of a block."""
        norms = (FoldIntoNorm(start, self.norm_offset) for start in self.starts)
        attention_fold, mlp_fold = norms if self.norms_before else (None, None)
        added = partial(Projection, residual_factor=self.residual_factor(config))
        mlp, _, up, last = self.mlp
        first, second = (() if norm is None else (norm,) for norm in self.norms_after)
        output = added(self.output, f"self_attn.{self.output}", residual=self.starts[0], norms=first)
        down = added(last, f"{mlp}.{last}", residual=self.starts[1], norms=second)
        # A value row that several query heads share meets several columns of o_proj, each with a
        # zeta of its own.
        own_values = config.num_attention_heads == config.num_key_value_heads
        return BlockLayout.of(
            config,
            (self.attention_inputs(config), attention_fold),
            ((output,), FoldIntoRows("v_proj") if own_values else None),
            (self.mlp_inputs(config), mlp_fold),
            ((down,), FoldIntoRows(up)),  # its input is act(gate) * up, linear in up
        )

    def without_attention(
        self,
        config: PreTrainedConfig,
        layout: BlockLayout,
        names: tuple[str, ...],
        fold: Fold,
        readers: tuple[str, ...] = (),
    ) -> BlockLayout:
        """Return the layout of a block with something else in the place of attention.

        Its linear layers have ``names``, the last that of the output, whose zeta goes where ``fold`` says;
        ``readers`` read its input too and keep their precision.
        """
        norm, factor = self.starts[0], self.residual_factor(config)
        *inputs, output = (Projection(name.rpartition(".")[2], name) for name in names)
        output = replace(output, residual=norm, residual_factor=factor)
        groups = (
            InputGroup("attention_input", tuple(inputs), FoldIntoNorm(norm, self.norm_offset, readers)),
            InputGroup("attention_output", (output,), fold),
        )
        return replace(layout, groups=(*groups, *layout.groups[2:]))

    def attention_inputs(self, config: PreTrainedConfig) -> tuple[Projection, ...]:
        """Return the projections that see the input of the attention."""
        return tuple(Projection(f"{r[0]}_proj", f"self_attn.{r[0]}_proj", r) for r in QKV)

    def mlp_inputs(self, config: PreTrainedConfig) -> tuple[Projection, ...]:
        """Return the projections that see the input of the feed-forward network."""
        mlp, *names, _ = self.mlp
        if self.fused_mlp is not None:
            size, module = self.mlp_width(config), f"{mlp}.{self.fused_mlp}"
            return tuple(Projection(n, module, rows=(i * size, (i + 1) * size)) for i, n in enumerate(names))
        return tuple(Projection(name, f"{mlp}.{name}") for name in names)

    def mlp_width(self, config: PreTrainedConfig) -> int:
        """Return the rows of gate, and of up, where they are one matrix."""
        return int(config.intermediate_size)

    def residual_factor(self, config: PreTrainedConfig) -> float:
        """Return what the outputs of the sublayers are multiplied by before they are added."""
        return 1.0

    def rotates(self, attention: nn.Module) -> bool:
        """Return whether an attention rotates its queries and keys; some of SmolLM3 don't."""
        return bool(getattr(attention, "use_rope", True))

    def restore_buffers(self, model: PreTrainedModel, device: torch.device) -> None:
        """Compute RoPE's frequencies; they are float32 whatever the model's type."""
        rotary = type(model.model.get_submodule(self.rotary))
        model.model.set_submodule(self.rotary, rotary(model.config).to(device))

    def embed(self, model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, Mapping[str, Any]]:
        """Embed the tokens."""
        hidden = model.model.embed_tokens(ids)
        return hidden, self.arguments(model, hidden)

    def arguments(self, model: PreTrainedModel, hidden: Tensor) -> Mapping[str, Any]:
        """Return mask and RoPE's cos and sin, each ``[1, L, d_h]``, by the kind of block."""
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]  # [1, L]
        return {
            kind: {
                "attention_mask": self.masks[kind](
                    model.config, hidden, attention_mask=None, past_key_values=None
                ),
                "position_embeddings": self.rotations(model, hidden, positions, kind),
                "position_ids": positions,
            }
            for kind in sorted(set(attention_kinds(model.config)))
        }

    def rotations(self, model: PreTrainedModel, hidden: Tensor, positions: Tensor, kind: str) -> Any:
        """Return RoPE's cos and sin in blocks of a kind."""
        rotary = model.model.get_submodule(self.rotary)
        return rotary(hidden, positions, *((kind,) if hasattr(rotary, "layer_types") else ()))

    def run_block(self, block: nn.Module, hidden: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        """Run one block, with the arguments of its kind."""
        attention: Any = block.get_submodule("self_attn")
        kind = attention_kinds(attention.config)[attention.layer_idx]
        return cast(Tensor, block(hidden, **arguments[kind]))

    def head(self, model: PreTrainedModel, hidden: Tensor) -> Tensor:
        """Run final norm and head."""
        return cast(Tensor, model.lm_head(model.model.get_submodule(self.final_norm)(hidden)))

    @contextmanager
    def observe_attention(self, model: PreTrainedModel, block: nn.Module, report: Observer) -> Iterator[None]:
        """Call ``report`` for each batch."""
        module = block.get_submodule("self_attn")
        layout, norms = self.layout(model.config, cast(Any, module).layer_idx), self.norm_weights(block)
        seen: dict[str, Any] = {}

        def keep_rotation(_module: nn.Module, _inputs: object, keywords: dict[str, Any]) -> None:
            cos, sin = keywords["position_embeddings"]  # [1, L, r]
            if self.half_rotations:
                cos, sin = (torch.cat((half, half), -1) for half in (cos, sin))
            if self.rotates_neighbours:  # the library repeats the columns of a half where it rotates
                cos, sin = (x[..., : x.shape[-1] // 2].repeat_interleave(2, -1) for x in (cos, sin))
            factor = self.query_factor(model.config, keywords["position_ids"][0])
            where = {"neighbours": self.rotates_neighbours, "before_norm": self.rotates_before_norms}
            seen["rotation"] = Rotation(cos[0], sin[0], **where, query_factor=factor)

        with ExitStack() as stack:
            if self.rotates(module):
                stack.enter_context(module.register_forward_pre_hook(keep_rotation, with_kwargs=True))
            if norms is not None:
                of_heads = (("query", layout.heads), ("key", layout.key_value_heads))
                for (name, heads), norm_name in zip(of_heads, self.head_norms, strict=True):
                    if not hasattr(module, norm_name):
                        continue
                    projection = module.get_submodule(f"{name[0]}_proj")
                    norm = module.get_submodule(norm_name)
                    hook = partial(_keep_scale, seen, f"{name}_inverse_square", heads, norm)
                    stack.enter_context(projection.register_forward_hook(hook))
            stack.enter_context(observed(model, module, lambda a: report(replace(a, **seen))))
            yield

    def query_factor(self, config: PreTrainedConfig, positions: Tensor) -> Tensor | None:
        """Return what queries at positions ``[L]`` are multiplied by; None: by nothing."""
        beta = (config.rope_parameters or {}).get("llama_4_scaling_beta")
        if beta is None:
            return None
        length = config.rope_parameters["original_max_position_embeddings"]
        far = (positions / length).floor()
        return cast(Tensor, 1 + beta * (1 + far).log())

    def norm_weights(self, block: nn.Module) -> tuple[Tensor, Tensor | None] | None:
        """Return what the norms on query and key heads multiply by, where there are any."""
        attention: Any = getattr(block, "self_attn", None)
        if not hasattr(attention, self.head_norms[0]):
            return None
        norms = [getattr(attention, name) for name in self.head_norms if hasattr(attention, name)]
        query, *key = ((norm.weight + self.norm_offset).view(-1, attention.head_dim) for norm in norms)
        return query, key[0] if key else None


def _keep_scale(
    seen: dict[str, Any], name: str, heads: int, norm: Any, _module: object, _inputs: object, output: Tensor
) -> None:
    """Keep ``1 / (mean square + eps)`` of a projection's output, which the norm gets."""
    epsilon = getattr(norm, "variance_epsilon", None) or norm.eps
    parts = output.unflatten(-1, (-1, norm.weight.numel()))  # [B, L, heads or 1, ...]
    if parts.shape[2] > heads:  # a gate follows each query
        parts = parts[:, :, ::2]
    scale = 1 / (parts.float().square().mean(-1) + epsilon)
    seen[name] = scale.expand(*scale.shape[:2], heads).transpose(1, 2)
