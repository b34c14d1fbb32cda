"""Every family keeps its promises, compared with the library's own forward pass."""

from collections import Counter
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma3nTextConfig, PreTrainedModel

from aespa_pl.errors import UserError
from aespa_pl.models import FAMILIES, family_of
from aespa_pl.models.family import FoldIntoNorm
from aespa_pl.models.kept import layout_of
from aespa_pl.settings import QuantizationSettings
from tests.models.examples import EXAMPLES, SINGLE, every_example, make_ids, make_model, make_ours

DOUBLE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}


def run(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the logits, block by block."""
    family = family_of(model.config)
    hidden, arguments = family.embed(model, ids)
    for block in model.get_submodule(family.blocks_path):
        hidden = family.run_block(block, hidden, arguments)
    return family.head(model, hidden)


@every_example
def test_residual_is_what_the_output_is_added_to(name: str) -> None:
    """The sum is where the next sublayer starts: before its LayerNorm, or through one behind it."""
    model = make_ours(name)
    family = family_of(model.config)
    block, layout = model.get_submodule(family.blocks_path)[0], family.layout(model.config)
    seen: dict[str, Tensor] = {}

    def keep(key: str, path: str, *, output: bool = False) -> None:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...], *outputs: Tensor) -> None:
            tensor = outputs[0] if output else inputs[0]
            tensor = tensor[0] if isinstance(tensor, tuple) else tensor  # beside its routing
            seen[key] = tensor.reshape(-1, tensor.shape[-1])

        module = block.get_submodule(path)
        (module.register_forward_hook if output else module.register_forward_pre_hook)(hook)

    # experts add to nothing by themselves, but their sum does
    writers = [p for p in layout.projections if p.residual is not None and p.expert is None]
    mixtures = () if layout.mixture is None else (layout.mixture,)
    counts = Counter((w.residual, (w.module, *w.norms)[-1], w.residual_factor) for w in (*writers, *mixtures))
    assert list(counts.values()) == [layout.sides_of(cast(str, residual)) for residual, *_ in counts]
    sums = list(counts)
    assert len(sums) == 2 + (name == "gemma4-small")
    for number, (residual, path, _) in enumerate(sums):
        keep(f"{number} residual", residual)
        keep(f"{number} output", path, output=True)
    hidden, arguments = family.embed(model, make_ids())
    result = family.run_block(block, hidden, arguments)[..., : model.config.hidden_size].flatten(0, 1)
    first, *others = (
        seen[f"{number} residual"] + factor * seen[f"{number} output"]
        for number, (_, _, factor) in enumerate(sums)
    )
    if name == "opt-350m":
        first, others[0] = block.self_attn_layer_norm(first), block.final_layer_norm(others[0])
    if name.startswith("gemma4"):
        others[-1] = others[-1] * block.layer_scalar
    if name == "bloom-post-residual":
        first = block.post_attention_layernorm(first)
    residuals = (seen[f"{number} residual"] for number in range(1, len(sums)))
    for found, expected in zip((first, *others), (*residuals, result), strict=True):
        torch.testing.assert_close(found, expected, **SINGLE)


@every_example
def test_blocks_one_by_one_give_the_librarys_logits(name: str) -> None:
    model, ids = make_ours(name), make_ids()
    torch.testing.assert_close(run(model, ids), model(ids, use_cache=False).logits, **DOUBLE)


@every_example
def test_experts_of_their_own_compute_what_the_librarys_compute(name: str) -> None:
    model, ids = make_model(name), make_ids()
    expected = model(ids, use_cache=False).logits
    family_of(model.config).unfuse(model)
    torch.testing.assert_close(run(model, ids), expected, **DOUBLE)


@every_example
def test_arguments_depend_on_the_shape_of_hidden_states_only(name: str) -> None:
    model, ids = make_ours(name), make_ids()
    family = family_of(model.config)
    hidden, arguments = family.embed(model, ids)
    block = model.get_submodule(family.blocks_path)[-1]
    other = family.arguments(model, torch.zeros_like(hidden))
    torch.testing.assert_close(
        family.run_block(block, hidden, other), family.run_block(block, hidden, arguments)
    )


@every_example
def test_every_matrix_of_a_block_is_a_projection(name: str) -> None:
    model = make_ours(name)
    family = family_of(model.config)
    for index, block in enumerate(model.get_submodule(family.blocks_path)):
        layout = family.layout(model.config, index)
        projections = layout.projections
        folds = (group.fold for group in layout.groups if isinstance(group.fold, FoldIntoNorm))
        full = {path for fold in folds for path in fold.readers}  # those that keep their precision
        if layout.mixture is not None and layout.mixture.input_norm is not None:  # it reads the stream
            full |= {f"{layout.mixture.router}.proj"}
        if layout.latent:
            full |= {"self_attn.kv_b_proj"}
        linear = {path for path, m in block.named_modules() if isinstance(m, nn.Linear)}
        assert {projection.module for projection in projections} == linear - full
        assert len({projection.name for projection in projections}) == len(projections)


@every_example
def test_roles_are_those_of_the_names(name: str) -> None:
    settings = EXAMPLES[name]()
    roles = {
        "query": "query", "key": "key", "value": "value",
        "q_proj": "query", "k_proj": "key", "v_proj": "value",
    }  # fmt: skip
    layout = family_of(settings).layout(settings)
    found = {p.name: p.role.value for p in layout.projections}
    if layout.latent:
        assert set(found.values()) == {"other"}
        return
    keys_are_values = name == "gemma4-full"
    if keys_are_values:
        roles["k_proj"] = "value"
    assert found == {projection: roles.get(projection, "other") for projection in found}
    assert len(set(found.values())) == 4 - keys_are_values


@every_example
def test_projections_of_a_group_see_the_same_input(name: str) -> None:
    model, ids = make_ours(name), make_ids()
    family = family_of(model.config)
    block = model.get_submodule(family.blocks_path)[0]
    inputs: dict[str, Tensor] = {}
    for path, module in block.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _, x, path=path: inputs.__setitem__(path, x[0]))
    hidden, arguments = family.embed(model, ids)
    family.run_block(block, hidden, arguments)
    for group in family.layout(model.config).groups:
        for projections in group.inputs.values():
            first, *others = (inputs[projection.module] for projection in projections)
            assert all(torch.equal(first, other) for other in others)


@every_example
def test_model_type_and_blocks_are_the_models(name: str) -> None:
    model = make_ours(name)
    family = family_of(model.config)
    assert model.config.model_type in family.model_types
    assert len(model.get_submodule(family.blocks_path)) == model.config.num_hidden_layers


def test_no_model_type_belongs_to_two_families() -> None:
    names = [name for family in FAMILIES for name in family.model_types]
    assert len(set(names)) == len(names)


def test_part_that_a_model_has_and_no_family_is_named() -> None:
    with pytest.raises(UserError, match=r"'gemma3n_text' in .* supported \(per-layer embeddings\): "):
        family_of(Gemma3nTextConfig())


@pytest.mark.parametrize(("name", "value"), [("gemma3", True), ("gemma4", "all")])
def test_attention_in_both_directions_is_refused(name: str, value: Any) -> None:
    settings: Any = EXAMPLES[name]()
    settings.use_bidirectional_attention = value
    with pytest.raises(UserError, match="use_bidirectional_attention in config"):
        family_of(settings)


@pytest.mark.parametrize(("kept", "sides"), [({}, 2), ({"expert_*": 16}, 1), ({"down_proj": 16}, 1)])
def test_only_quantized_outputs_make_up_for_an_error_together(kept: dict[str, int], sides: int) -> None:
    config = EXAMPLES["gemma4-moe"]()
    layout = layout_of(family_of(config), config, QuantizationSettings(bits_of=kept), 0)
    assert layout.sides_of("pre_feedforward_layernorm") == sides


def test_clamped_queries_are_refused() -> None:
    settings: Any = EXAMPLES["olmoe"]()
    settings.clip_qkv = 8.0
    with pytest.raises(UserError, match=r"\(clip_qkv 8.0 in config.json\) can't be quantized"):
        family_of(settings)


def test_a_model_that_is_not_causal_is_refused() -> None:
    settings: Any = EXAMPLES["llama"]()
    settings.is_causal = False
    with pytest.raises(UserError, match=r"is_causal in config\.json is false"):
        family_of(settings)


@pytest.mark.parametrize("name", ["opt", "bloom", "llama"])
def test_quantized_checkpoint_is_refused(name: str) -> None:
    config: Any = EXAMPLES[name]()
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(UserError, match=r"already quantized \(gptq in config.json\)"):
        family_of(config)
