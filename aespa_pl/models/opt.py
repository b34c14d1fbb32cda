"""OPT has learned positions, ReLU, and LayerNorm before (in the 350M model after) each sublayer."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask

from aespa_pl.models.family import QKV, BlockLayout, Family, FoldIntoNorm, FoldIntoRows, Projection
from aespa_pl.models.observed import Attention, Observer, observed


class OptFamily(Family):
    """Adapts OPT, with LayerNorm before (pre-LN) or after (post-LN) each sublayer."""

    title = "OPT"
    model_types = ("opt",)
    blocks_path = "model.decoder.layers"

    def layout(self, config: PreTrainedConfig, index: int = 0) -> BlockLayout:
        """Return the projections of a block."""
        # A LayerNorm after the sublayer feeds the residual as well, and one without weights has
        # nothing that zeta could be multiplied into.
        norms = config.do_layer_norm_before and config.layer_norm_elementwise_affine
        before = ("self_attn_layer_norm", "final_layer_norm")
        attention_fold, mlp_fold = (FoldIntoNorm(name) if norms else None for name in before)
        # the input of a sublayer, before its LayerNorm if it has one there
        residuals = before if config.do_layer_norm_before else ("self_attn.q_proj", "fc1")
        # relu(zeta x) = zeta relu(x) for zeta > 0; no other activation of the library has that.
        homogeneous = config.activation_function == "relu"
        attended = tuple(Projection(f"{role[0]}_proj", f"self_attn.{role[0]}_proj", role) for role in QKV)
        output = Projection("out_proj", "self_attn.out_proj", residual=residuals[0])
        down = Projection("fc2", "fc2", residual=residuals[1])
        return BlockLayout.of(
            config,
            (attended, attention_fold),
            ((output,), FoldIntoRows("v_proj")),
            ((Projection("fc1", "fc1"),), mlp_fold),
            ((down,), FoldIntoRows("fc1") if homogeneous else None),
        )

    def embed(self, model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, Mapping[str, Any]]:
        """Add embeddings of tokens (projected to d where theirs is smaller) and positions."""
        decoder = model.model.decoder
        hidden = decoder.embed_tokens(ids)
        if decoder.project_in is not None:
            hidden = decoder.project_in(hidden)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]  # [1, L]
        hidden = hidden + decoder.embed_positions(torch.ones_like(ids), position_ids=positions)
        return hidden, self.arguments(model, hidden)

    def arguments(self, model: PreTrainedModel, hidden: Tensor) -> Mapping[str, Any]:
        """Return the mask."""
        mask = create_causal_mask(model.config, hidden, attention_mask=None, past_key_values=None)
        return {"attention_mask": mask}

    def head(self, model: PreTrainedModel, hidden: Tensor) -> Tensor:
        """Run final norm and projection, where the model has them, and the head."""
        decoder = model.model.decoder
        if decoder.final_layer_norm is not None:
            hidden = decoder.final_layer_norm(hidden)
        if decoder.project_out is not None:
            hidden = decoder.project_out(hidden)
        return cast(Tensor, model.lm_head(hidden))

    @contextmanager
    def observe_attention(self, model: PreTrainedModel, block: nn.Module, report: Observer) -> Iterator[None]:
        """Call ``report`` for each batch."""
        head_dim = self.layout(model.config).head_dim

        def without_factor(attention: Attention) -> None:
            # OPT's module hands its attention function a query that it has already multiplied by
            # 1 / sqrt(d_h). G_K = E[Q^T Q] is weighed against lambda, so the factor must go; in
            # float32, because half precision would round once more.
            query = attention.query
            exact = query.to(torch.promote_types(query.dtype, torch.float32))
            scaling = attention.scaling / head_dim**0.5
            report(replace(attention, query=exact * head_dim**0.5, scaling=scaling))

        with observed(model, block.get_submodule("self_attn"), without_factor):
            yield
