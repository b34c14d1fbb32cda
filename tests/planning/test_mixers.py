"""What stands in the place of attention needs what is planned for it."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, DeepseekV3Config, GraniteMoeHybridConfig

from aespa_pl.models import family_of
from aespa_pl.planning.shape import Shape
from tests.models.examples import make_model
from tests.planning.shapes import shape


def test_a_short_convolution_keeps_what_is_convolved_and_what_comes_out() -> None:
    """All that autograd keeps, but for the inputs of both projections, and the output of the first."""
    module: Any = make_model("lfm2", torch.float32).model.layers[1].conv.requires_grad_()
    mixed, tokens = shape("lfm2").kinds[1], 64
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = module(torch.randn(1, tokens, mixed.hidden, requires_grad=True))
    assert output.requires_grad
    for weight in module.parameters():
        kept.pop(weight.untyped_storage().data_ptr(), None)
    counted = mixed.mixed(tokens) + sum(m.columns for m in mixed.matrices[:2]) + mixed.matrices[0].rows
    assert sum(kept.values()) == pytest.approx(tokens * counted, rel=0.05)


class Peak(TorchDispatchMode):
    """Counts the bytes of what operations have made, and of the most at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held: set[int] = set()
        self.now = self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in filter(torch.is_tensor, tree_leaves(made)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.held:
                self.held.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        return made

    def _freed(self, key: int, size: int) -> None:
        self.held.discard(key)
        self.now -= size


def test_a_scan_of_mamba_has_its_chunks_and_states_in_memory() -> None:
    config = GraniteMoeHybridConfig(
        hidden_size=256, num_attention_heads=4, shared_intermediate_size=8, num_local_experts=0,
        mamba_n_heads=16, mamba_d_head=32, mamba_d_state=64, mamba_chunk_size=128, num_hidden_layers=1,
        vocab_size=64,
    )  # fmt: skip
    module: Any = AutoModelForCausalLM.from_config(config).model.layers[0].mamba.eval()
    found = Shape.of(config, family_of(config).layouts(config))
    gradients = sum(p.numel() for p in module.parameters())
    for length in (256, 96):  # the last chunk is filled up
        module.zero_grad(set_to_none=True)
        with Peak() as peak:
            module(torch.randn(1, length, 256, requires_grad=True)).sum().backward()
        assert 0.85 < (peak.most / 4 - gradients) / (length * found.mixed(length)) < 1.05


@pytest.mark.parametrize("value_size", [48, 32])
def test_latent_attention_has_its_heads_in_memory_and_scores_where_values_have_another_size(
    value_size: int,
) -> None:
    config = DeepseekV3Config(
        hidden_size=64, num_attention_heads=8, num_key_value_heads=8, q_lora_rank=16, kv_lora_rank=16,
        qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=value_size, num_hidden_layers=1, vocab_size=64,
        intermediate_size=8, first_k_dense_replace=1, n_routed_experts=8,
    )  # fmt: skip
    model, family, length = AutoModelForCausalLM.from_config(config), family_of(config), 96
    found = Shape.of(config, family.layouts(config))
    scores = 3 * 8 * length if found.forms_probabilities else 0
    assert (scores > 0) == (value_size != 48)
    hidden = torch.randn(1, length, 64, requires_grad=True)
    arguments = family.arguments(model, hidden)
    with Peak() as peak:
        family.run_block(model.get_submodule("model.layers")[0], hidden, arguments).sum().backward()
    numbers = peak.most / 4 - found.block_weights  # gradients
    assert 0.6 < numbers / (length * (found.mixed(length) + scores)) < 1.05
