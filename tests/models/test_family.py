"""Every family keeps its promises, compared with the library's own forward pass."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, PreTrainedModel

from aespa_pl.errors import UserError
from aespa_pl.models import FAMILIES, family_of
from aespa_pl.models.family import Attention
from tests.models.examples import EXAMPLES, LENGTH, WINDOW, make_ids, make_model

every_example = pytest.mark.parametrize("name", EXAMPLES)

# The library's RMSNorm and its softmax are float32 in a float64 model: 6e-8 a rounding.
SINGLE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
DOUBLE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}


def run(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the logits, block by block."""
    family = family_of(model.config)
    hidden, arguments = family.embed(model, ids)
    for block in model.get_submodule(family.blocks_path):
        hidden = family.run_block(block, hidden, arguments)
    return family.head(model, hidden)


def observe(model: PreTrainedModel, ids: Tensor) -> list[Attention]:
    """Return what was seen in each block."""
    family = family_of(model.config)
    hidden, arguments = family.embed(model, ids)
    seen: list[Attention] = []
    for block in model.get_submodule(family.blocks_path):
        with family.observe_attention(model, block, seen.append):
            family.run_block(block, hidden, family.arguments(model, hidden))
        hidden = family.run_block(block, hidden, arguments)
    return seen


@every_example
def test_residual_is_what_the_output_is_added_to(name: str) -> None:
    """The sum is where the next sublayer starts: before its LayerNorm, or through one behind it."""
    model = make_model(name)
    family = family_of(model.config)
    block, layout = model.get_submodule(family.blocks_path)[0], family.layout(model.config)
    seen: dict[str, Tensor] = {}

    def keep(key: str, path: str, *, output: bool = False) -> None:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...], *outputs: Tensor) -> None:
            tensor = outputs[0] if output else inputs[0]
            seen[key] = tensor.reshape(-1, tensor.shape[-1])

        module = block.get_submodule(path)
        (module.register_forward_hook if output else module.register_forward_pre_hook)(hook)

    writers = [p for p in layout.projections if p.residual is not None]
    assert [p.role for p in writers] == ["other", "other"]
    for p in writers:
        assert p.residual is not None
        keep(f"{p.name} residual", p.residual)
        keep(f"{p.name} output", p.module, output=True)
    hidden, arguments = family.embed(model, make_ids())
    result = family.run_block(block, hidden, arguments).flatten(0, 1)
    first, second = (seen[f"{p.name} residual"] + seen[f"{p.name} output"] for p in writers)
    next_residual = seen[f"{writers[1].name} residual"]
    if name == "opt-350m":
        first, second = block.self_attn_layer_norm(first), block.final_layer_norm(second)
    if name == "bloom-post-residual":
        first = block.post_attention_layernorm(first)
    torch.testing.assert_close(first, next_residual, **SINGLE)
    torch.testing.assert_close(second, result, **SINGLE)


def windows(model: PreTrainedModel) -> list[int]:
    """Return how far back each block sees."""
    kinds = getattr(model.config, "layer_types", None)
    if kinds is None:
        everywhere = getattr(model.config, "sliding_window", None) or LENGTH
        return [everywhere] * model.config.num_hidden_layers
    return [WINDOW if kind == "sliding_attention" else LENGTH for kind in kinds]


def explicit_probabilities(query: Tensor, key: Tensor, window: int, slope: float = 0.0) -> Tensor:
    """Return the probabilities ``[L, L]`` of one head, entry by entry."""
    length, size = query.shape
    scores = torch.full((length, length), -torch.inf, dtype=torch.float64)
    for i in range(length):
        for j in range(max(0, i - window + 1), i + 1):
            scores[i, j] = query[i] @ key[j] / size**0.5 - slope * (i - j)
    return scores.softmax(-1)


@every_example
def test_blocks_one_by_one_give_the_librarys_logits(name: str) -> None:
    model, ids = make_model(name), make_ids()
    torch.testing.assert_close(run(model, ids), model(ids, use_cache=False).logits, **DOUBLE)


@every_example
def test_arguments_depend_on_the_shape_of_hidden_states_only(name: str) -> None:
    model, ids = make_model(name), make_ids()
    family = family_of(model.config)
    hidden, arguments = family.embed(model, ids)
    block = model.get_submodule(family.blocks_path)[-1]
    other = family.arguments(model, torch.zeros_like(hidden))
    torch.testing.assert_close(
        family.run_block(block, hidden, other), family.run_block(block, hidden, arguments)
    )


@every_example
def test_observed_probabilities_are_the_librarys(name: str) -> None:
    model, ids = make_model(name), make_ids()
    seen = observe(model, ids)
    model.set_attn_implementation("eager")
    expected = model(ids, use_cache=False, output_attentions=True).attentions
    assert len(seen) == len(expected) == 3
    for attention, probabilities in zip(seen, expected, strict=True):
        torch.testing.assert_close(
            attention.probabilities(), probabilities, **SINGLE, check_dtype=False
        )


@every_example
def test_probabilities_follow_from_the_observed_queries_and_keys(name: str) -> None:
    """The queries are free of 1 / sqrt(d_h), windows and ALiBi are in the probabilities."""
    model, ids = make_model(name), make_ids(1)
    layout = family_of(model.config).layout(model.config)
    shared = layout.heads // layout.key_value_heads
    for attention, window in zip(observe(model, ids), windows(model), strict=True):
        assert attention.query.shape == (1, layout.heads, LENGTH, layout.head_dim)
        assert attention.key.shape == (1, layout.key_value_heads, LENGTH, layout.head_dim)
        for head in range(layout.heads):
            slope = 2.0 ** (-2 * (head + 1)) if name.startswith("bloom") else 0.0
            expected = explicit_probabilities(
                attention.query[0, head], attention.key[0, head // shared], window, slope
            )
            torch.testing.assert_close(attention.probabilities()[0, head], expected, **SINGLE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@every_example
def test_observed_block_gives_the_same_bits(name: str, dtype: torch.dtype) -> None:
    """The walk counts on it: a replay, which observes nothing, gives the same hidden states."""
    model, ids = make_model(name, dtype), make_ids()
    family = family_of(model.config)
    hidden, arguments = family.embed(model, ids)
    for block in model.get_submodule(family.blocks_path):
        plain = family.run_block(block, hidden, arguments)
        seen: list[Attention] = []
        with family.observe_attention(model, block, seen.append):
            observed = family.run_block(block, hidden, family.arguments(model, hidden))
        assert len(seen) == 1
        assert observed.dtype == dtype
        assert torch.equal(observed, plain)
        hidden = plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["opt", "bloom", "llama-grouped", "mistral-window", "qwen3-mixed"])
def test_one_token_is_observed(name: str, dtype: torch.dtype) -> None:
    model, ids = make_model(name, dtype), make_ids()[:, :1]
    family = family_of(model.config)
    hidden, arguments = family.embed(model, ids)
    plain = family.run_block(model.get_submodule(family.blocks_path)[0], hidden, arguments)
    seen: list[Attention] = []
    block = model.get_submodule(family.blocks_path)[0]
    with family.observe_attention(model, block, seen.append):
        observed = family.run_block(block, hidden, family.arguments(model, hidden))
    assert torch.equal(observed, plain)
    assert torch.equal(seen[0].probabilities(), torch.ones(2, 4, 1, 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama-grouped", "qwen3-mixed"])
def test_probabilities_are_computed_in_float32_from_queries_in_half_precision(
    name: str, dtype: torch.dtype
) -> None:
    model, ids = make_model(name, dtype), make_ids(1)
    for attention, window in zip(observe(model, ids), windows(model), strict=True):
        assert attention.query.dtype == attention.key.dtype == dtype
        query, key = attention.query[0].double(), attention.key[0].double()
        for head in range(4):
            expected = explicit_probabilities(query[head], key[head // 2], window)
            found = attention.probabilities()[0, head].double()
            torch.testing.assert_close(found, expected, **SINGLE)


@pytest.mark.parametrize("name", ["opt", "bloom", "qwen3-mixed"])
def test_observation_ends_with_its_context(name: str) -> None:
    model, ids = make_model(name), make_ids()
    family = family_of(model.config)
    block = model.get_submodule(family.blocks_path)[0]
    before = model.config._attn_implementation
    seen: list[Attention] = []

    def fail() -> None:
        with family.observe_attention(model, block, seen.append):
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert model.config._attn_implementation == before
    hooks = [module._forward_pre_hooks or module._forward_hooks for module in block.modules()]
    assert not any(hooks)
    hidden, arguments = family.embed(model, ids)
    family.run_block(block, hidden, arguments)
    assert not seen


@pytest.mark.parametrize("name", ["opt", "bloom", "llama"])
def test_observation_sees_its_own_block_and_model_only(name: str) -> None:
    model, other, ids = make_model(name), make_model(name), make_ids()
    family = family_of(model.config)
    first, second = list(model.get_submodule(family.blocks_path))[:2]
    seen: list[Attention] = []
    with family.observe_attention(model, first, seen.append):
        hidden, arguments = family.embed(model, ids)
        family.run_block(second, hidden, arguments)
        run(other, ids)
        assert not seen
        family.run_block(first, hidden, arguments)
    assert len(seen) == 1


@every_example
def test_every_matrix_of_a_block_is_a_projection(name: str) -> None:
    model = make_model(name)
    family = family_of(model.config)
    projections = family.layout(model.config).projections
    for block in model.get_submodule(family.blocks_path):
        linear = {path for path, m in block.named_modules() if isinstance(m, nn.Linear)}
        assert {projection.module for projection in projections} == linear
    assert len({projection.name for projection in projections}) == len(projections)


@every_example
def test_roles_are_those_of_the_names(name: str) -> None:
    settings = EXAMPLES[name]()
    roles = {
        "query": "query", "key": "key", "value": "value",
        "q_proj": "query", "k_proj": "key", "v_proj": "value",
    }  # fmt: skip
    found = {p.name: p.role.value for p in family_of(settings).layout(settings).projections}
    assert found == {projection: roles.get(projection, "other") for projection in found}
    assert len(set(found.values())) == 4


@every_example
def test_projections_of_a_group_see_the_same_input(name: str) -> None:
    model, ids = make_model(name), make_ids()
    family = family_of(model.config)
    block = model.get_submodule(family.blocks_path)[0]
    inputs: dict[str, Tensor] = {}
    for path, module in block.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _, x, path=path: inputs.__setitem__(path, x[0]))
    hidden, arguments = family.embed(model, ids)
    family.run_block(block, hidden, arguments)
    for group in family.layout(model.config).groups:
        first, *others = (inputs[projection.module] for projection in group.projections)
        assert all(torch.equal(first, other) for other in others)


@every_example
def test_model_type_and_blocks_are_the_models(name: str) -> None:
    model = make_model(name)
    family = family_of(model.config)
    assert model.config.model_type in family.model_types
    assert len(model.get_submodule(family.blocks_path)) == model.config.num_hidden_layers


def test_no_model_type_belongs_to_two_families() -> None:
    names = [name for family in FAMILIES for name in family.model_types]
    assert len(set(names)) == len(names)


def test_unknown_model_type_is_refused_with_those_that_work() -> None:
    with pytest.raises(
        UserError, match=r"model_type 'gpt2' in config.json .* one of opt, bloom, llama"
    ):
        family_of(GPT2Config())


@pytest.mark.parametrize("name", ["opt", "bloom", "llama"])
def test_quantized_checkpoint_is_refused(name: str) -> None:
    config: Any = EXAMPLES[name]()
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(UserError, match=r"already quantized \(gptq in config.json\)"):
        family_of(config)
