"""LLaMA and its relatives have RoPE, RMSNorm, a gated feed-forward network, perhaps fewer key heads.

The relatives differ in details that are read from their configuration: biases, the head size, norms
on query and key heads (Qwen3), sliding windows in all or in some blocks (Mistral, Qwen2, Qwen3).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from aespa_pl.errors import UserError
from aespa_pl.models.attention import observed
from aespa_pl.models.family import (
    Attention,
    BlockLayout,
    Family,
    FoldIntoNorm,
    FoldIntoRows,
    InputGroup,
    Projection,
    Role,
)

MASKS = {
    "full_attention": create_causal_mask,
    "sliding_attention": create_sliding_window_causal_mask,
}
"""Function that makes the mask of each kind of block, by the kind's name in ``config.layer_types``."""


class LlamaFamily(Family):
    """Adapts LLaMA, Mistral, Qwen2 and Qwen3, with and without grouped query heads."""

    model_types = ("llama", "mistral", "qwen2", "qwen3")
    blocks_path = "model.layers"

    def check(self, config: PreTrainedConfig) -> None:
        """Refuse a quantized model, and attention masks that the library would not make.

        Raises:
            UserError: ``layer_types`` in config.json has an unknown kind, or one that this model
                type ignores; or ``sliding_window`` is missing where blocks have one.
        """
        super().check(config)
        used, stated = attention_kinds(config), getattr(config, "layer_types", None)
        if unknown := sorted(set(used) - MASKS.keys()):
            raise UserError(
                f"model.pretrained: layer_types {', '.join(unknown)} in config.json is not "
                f"supported: expected {' or '.join(MASKS)}"
            )
        if stated is not None and tuple(stated) != used:
            raise UserError(
                f"model.pretrained: layer_types in config.json: transformers runs {used[0]} in "
                f"every block of a {config.model_type}, got {', '.join(sorted(set(stated)))}: "
                "correct layer_types or model_type"
            )
        if "sliding_attention" in used and config.sliding_window is None:
            raise UserError(
                "model.pretrained: layer_types in config.json has sliding_attention, but there is "
                "no sliding_window: set use_sliding_window to true and sliding_window to its size"
            )

    def layout(self, config: PreTrainedConfig, index: int = 0) -> BlockLayout:
        """Return the projections of a block."""
        norms = ("input_layernorm", "post_attention_layernorm")
        query = Projection("q_proj", "self_attn.q_proj", Role.QUERY)
        key = Projection("k_proj", "self_attn.k_proj", Role.KEY)
        value = Projection("v_proj", "self_attn.v_proj", Role.VALUE)
        output = Projection("o_proj", "self_attn.o_proj", residual=norms[0])
        gate, up = (Projection(f"{name}_proj", f"mlp.{name}_proj") for name in ("gate", "up"))
        down = Projection("down_proj", "mlp.down_proj", residual=norms[1])
        # A value row that several query heads share meets several columns of o_proj, each with a
        # zeta of its own.
        own_values = config.num_attention_heads == config.num_key_value_heads
        return BlockLayout.of(
            config,
            InputGroup("attention_input", (query, key, value), FoldIntoNorm(norms[0])),
            InputGroup(
                "attention_output", (output,), FoldIntoRows("v_proj") if own_values else None
            ),
            InputGroup("mlp_input", (gate, up), FoldIntoNorm(norms[1])),
            # its input is act(gate) * up, linear in up
            InputGroup("mlp_hidden", (down,), FoldIntoRows("up_proj")),
        )

    def restore_buffers(self, model: PreTrainedModel, device: torch.device) -> None:
        """Compute RoPE's frequencies; they are float32 whatever the model's type."""
        decoder = cast(LlamaForCausalLM, model).model
        rotary = type(decoder.rotary_emb)(model.config)
        decoder.rotary_emb = rotary.to(device)

    def embed(self, model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, Mapping[str, Any]]:
        """Embed the tokens."""
        hidden = cast(LlamaForCausalLM, model).model.embed_tokens(ids)
        return hidden, self.arguments(model, hidden)

    def arguments(self, model: PreTrainedModel, hidden: Tensor) -> Mapping[str, Any]:
        """Return mask and RoPE's cos and sin, each ``[1, L, d_h]``, by the kind of block."""
        rotary = cast(LlamaForCausalLM, model).model.rotary_emb
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]  # [1, L]
        rotation = rotary(hidden, positions)
        return {
            kind: {
                "attention_mask": MASKS[kind](
                    model.config, hidden, attention_mask=None, past_key_values=None
                ),
                "position_embeddings": rotation,
            }
            for kind in sorted(set(attention_kinds(model.config)))
        }

    def run_block(self, block: nn.Module, hidden: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        """Run one block, with the arguments of its kind."""
        attention: Any = block.get_submodule("self_attn")
        kind = attention_kinds(attention.config)[attention.layer_idx]
        return cast(Tensor, block(hidden, **arguments[kind]))

    def head(self, model: PreTrainedModel, hidden: Tensor) -> Tensor:
        """Run final norm and head."""
        causal = cast(LlamaForCausalLM, model)
        return cast(Tensor, causal.lm_head(causal.model.norm(hidden)))

    @contextmanager
    def observe_attention(
        self, model: PreTrainedModel, block: nn.Module, observer: Callable[[Attention], None]
    ) -> Iterator[None]:
        """Call ``observer`` for each batch."""
        module = block.get_submodule("self_attn")
        seen: dict[str, Any] = {}

        def keep_rotation(_module: nn.Module, _inputs: object, keywords: dict[str, Any]) -> None:
            cos, sin = keywords["position_embeddings"]  # [1, L, d_h]
            seen["rotation"] = (cos[0], sin[0])

        def report(attention: Attention) -> None:
            observer(replace(attention, **seen))

        with ExitStack() as stack:
            handles = [module.register_forward_pre_hook(keep_rotation, with_kwargs=True)]
            if self.norm_weights(block) is not None:
                handles += [
                    module.get_submodule(norm).register_forward_pre_hook(_keep_scale(seen, name))
                    for norm, name in (
                        ("q_norm", "query_inverse_square"),
                        ("k_norm", "key_inverse_square"),
                    )
                ]
            for handle in handles:
                stack.callback(handle.remove)
            stack.enter_context(observed(model, module, report))
            yield

    def norm_weights(self, block: nn.Module) -> tuple[Tensor, Tensor] | None:
        """Return the weights of the norms on query and key heads, which Qwen3 has."""
        attention: Any = block.get_submodule("self_attn")
        if not hasattr(attention, "q_norm"):
            return None
        return attention.q_norm.weight, attention.k_norm.weight


def attention_kinds(config: PreTrainedConfig) -> tuple[str, ...]:
    """Return the kind of attention, a key of MASKS, of each block as the library runs it."""
    if config.model_type in ("qwen2", "qwen3"):
        return tuple(config.layer_types)
    # The library's LLaMA has no window, and its Mistral has one in all blocks or in none.
    window = config.sliding_window if config.model_type == "mistral" else None
    kind = "full_attention" if window is None else "sliding_attention"
    return (kind,) * int(config.num_hidden_layers)


def _keep_scale(seen: dict[str, Any], name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    """Return a hook on a head norm that keeps ``1 / (mean square + eps)`` of its inputs."""

    def hook(norm: Any, inputs: tuple[Tensor, ...]) -> None:
        square = inputs[0].float().square().mean(-1)  # [B, L, heads]
        seen[name] = (1 / (square + norm.variance_epsilon)).transpose(1, 2)

    return hook
