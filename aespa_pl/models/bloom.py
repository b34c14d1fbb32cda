"""BLOOM has ALiBi instead of positions, one fused query-key-value matrix, and GELU."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask

from aespa_pl.errors import UserError
from aespa_pl.models.family import QKV, BlockLayout, Family, FoldIntoNorm, FoldIntoRows, Projection
from aespa_pl.models.observed import Attention, Observer

FUSED = "self_attention.query_key_value"


class BloomFamily(Family):
    """Adapts BLOOM."""

    title = "BLOOM"
    model_types = ("bloom",)
    blocks_path = "transformer.h"

    def forms_probabilities(self, config: PreTrainedConfig) -> bool:
        """Return True, because the library has no other attention for BLOOM."""
        return True

    def check(self, config: PreTrainedConfig) -> None:
        """Refuse a quantized model, and the emulation of tensor-parallel sums."""
        super().check(config)
        # The library then runs ``dense`` and ``dense_4h_to_h`` in slices and without their modules, so that
        # their inputs can't be observed.
        if config.pretraining_tp > 1 and config.slow_but_exact:
            raise UserError(
                "model.pretrained: slow_but_exact true with pretraining_tp "
                f"{config.pretraining_tp} in config.json is not supported: set it to false"
            )

    def layout(self, config: PreTrainedConfig, index: int = 0) -> BlockLayout:
        """Return the projections of a block."""
        # With this option the residual is taken after the LayerNorm, so that more than the
        # projections reads its output.
        norms = not config.apply_residual_connection_post_layernorm
        before = ("input_layernorm", "post_attention_layernorm")
        attention_fold, mlp_fold = (FoldIntoNorm(name) if norms else None for name in before)
        residuals = before if norms else (FUSED, "mlp.dense_h_to_4h")
        attended = tuple(Projection(role.value, FUSED, role, (i, 3)) for i, role in enumerate(QKV))
        output = Projection("dense", "self_attention.dense", residual=residuals[0])
        up = Projection("dense_h_to_4h", "mlp.dense_h_to_4h")
        down = Projection("dense_4h_to_h", "mlp.dense_4h_to_h", residual=residuals[1])
        return BlockLayout.of(
            config,
            (attended, attention_fold),
            ((output,), FoldIntoRows("value")),
            ((up,), mlp_fold),
            ((down,), None),  # GELU(zeta x) is not zeta GELU(x)
        )

    def embed(self, model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, Mapping[str, Any]]:
        """Embed the tokens and normalize them."""
        transformer = model.transformer
        hidden = transformer.word_embeddings_layernorm(transformer.word_embeddings(ids))
        return hidden, self.arguments(model, hidden)

    def arguments(self, model: PreTrainedModel, hidden: Tensor) -> Mapping[str, Any]:
        """Return ALiBi ``[B * n_h, 1, L]`` and the mask."""
        nothing_padded = torch.ones(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        heads = model.config.num_attention_heads
        alibi = model.transformer.build_alibi_tensor(nothing_padded, heads, hidden.dtype)
        mask = create_causal_mask(model.config, hidden, attention_mask=None, past_key_values=None)
        return {"alibi": alibi, "attention_mask": mask}

    def run_block(self, block: nn.Module, hidden: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        """Run one block, which returns its attention's probabilities as well."""
        return cast(Tensor, block(hidden, **arguments)[0])

    def head(self, model: PreTrainedModel, hidden: Tensor) -> Tensor:
        """Run final norm and head."""
        return cast(Tensor, model.lm_head(model.transformer.ln_f(hidden)))

    @contextmanager
    def observe_attention(self, model: PreTrainedModel, block: nn.Module, report: Observer) -> Iterator[None]:
        """Call ``report`` for each batch.

        BLOOM's attention does not go through the library's interface and computes everything in one
        method, so hooks read the inputs of that method. Its mask is the causal one, see ``arguments``.
        """
        layout = self.layout(model.config)
        attention: Any = block.get_submodule("self_attention")
        seen: dict[str, Tensor] = {}

        def keep_alibi(_module: nn.Module, _inputs: object, keywords: dict[str, Any]) -> None:
            seen["alibi"] = keywords["alibi"].unflatten(0, (-1, layout.heads))  # [B, n_h, 1, L]

        def see(_module: nn.Module, _inputs: object, rows: Tensor) -> None:
            # [B, L, n_h * 3 * d_h]
            parts = rows.view(*rows.shape[:2], layout.heads, 3, layout.head_dim).transpose(1, 2)
            query, key, _ = parts.unbind(-2)  # [B, n_h, L, d_h]
            report(Attention(query, key, attention.inv_norm_factor, alibi=seen["alibi"]))

        with (
            attention.register_forward_pre_hook(keep_alibi, with_kwargs=True),
            block.get_submodule(FUSED).register_forward_hook(see),
        ):
            yield
