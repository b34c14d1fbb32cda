"""Moments of the end loss are those of the library's whole model, and predict its KL divergence."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax
from transformers import PreTrainedModel

from aespa_pl.calibration import end_loss as end_losses
from aespa_pl.calibration import moments
from aespa_pl.calibration.end_loss import Seen, couplings, end_loss, head_input
from aespa_pl.errors import UserError
from aespa_pl.models import family_of
from aespa_pl.models.family import Role
from tests.models.examples import make_ids, make_model, save
from tests.models.test_streamed import open_stream

SEED = 3
NAMES = ["llama-grouped", "opt", "bloom", "mixtral", "gemma4-small"]


def seen(model: PreTrainedModel, ids: Tensor, folder: Path) -> dict[str, Seen]:
    """Return all matrices; their weights are copied, because the next one takes their place."""
    source = open_stream(save(model, folder))
    found = end_loss(source, ids, seed=SEED)
    return {f"{s.block}.{s.name}": s for s in found}


def logits_of(model: PreTrainedModel, ids: Tensor) -> Tensor:
    logits: Tensor = model(ids, use_cache=False).logits
    return logits.float()


def _whole_model(model: PreTrainedModel, ids: Tensor) -> tuple[dict[str, list[Tensor]], dict[str, Tensor]]:
    """Return the gradients at the output of each linear layer, and the squares of untied embeddings'."""
    paths = family_of(model.config).other_embeddings(model.config)
    tables = {name: model.get_submodule(path) for name, path in paths.items()}
    if not model.config.tie_word_embeddings:
        tables["embedding"] = model.get_input_embeddings()
    leaves = [table.get_parameter("weight") for table in tables.values()]
    modules = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    generator = torch.Generator().manual_seed(SEED)
    inner: dict[str, list[Tensor]] = {}
    squares = {name: torch.zeros_like(leaf) for name, leaf in zip(tables, leaves, strict=True)}
    outputs: dict[str, Tensor] = {}
    for name, module in modules.items():
        module.register_forward_hook(lambda _m, _x, y, n=name: outputs.update({n: y}))
    for leaf in (model.get_input_embeddings().weight, *leaves):
        leaf.requires_grad = True
    for segment in ids:
        outputs.clear()
        with torch.enable_grad():
            logits = logits_of(model, segment[None])[0]
            labels = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
            loss = cross_entropy(logits, labels, reduction="sum")
            gradients = torch.autograd.grad(loss, [*outputs.values(), *leaves])
        for name, gradient in zip(outputs, gradients, strict=False):
            inner.setdefault(name, []).append(gradient.flatten(0, -2))
        for name, gradient in zip(tables, gradients[len(outputs) :], strict=True):
            squares[name] += gradient.square()
    return inner, squares


@pytest.mark.parametrize("name", [*NAMES, "llama", "granite"])
def test_moments_are_those_of_one_backward_pass_of_the_whole_model(name: str, tmp_path: Path) -> None:
    model, ids = make_model(name, torch.float32), make_ids(3)
    found = seen(model, ids, tmp_path)
    family, count = family_of(model.config), ids.numel()
    family.unfuse(model)
    inner, squares = _whole_model(model, ids)
    compared = 0
    for block, layout in enumerate(family.layouts(model.config)):
        for p in layout.projections:
            path = f"{family.block_prefix(block)}{p.module}"
            if path not in inner:  # an expert that no token has chosen
                continue
            whole = torch.cat(inner[path])  # [tokens, rows]
            compared += 1
            parts = whole.square().sum(0) / count
            if p.fused[1] > 1:
                parts = parts.view(-1, p.fused[1], layout.head_dim)[:, p.fused[0]].flatten()
            torch.testing.assert_close(found[f"{block}.{p.name}"].gradients, parts, rtol=1e-3, atol=1e-9)
    assert compared >= 15
    for name, of_table in squares.items():
        rows = ids.unique()
        torch.testing.assert_close(found[f"None.{name}"].rows, rows)
        torch.testing.assert_close(
            found[f"None.{name}"].gradients, of_table[rows] / count, rtol=1e-3, atol=1e-9
        )


def limited(g: Tensor, largest: float) -> Tensor:
    """Return the gradients ``[tokens, rows]`` of a segment, those with large squares made smaller."""
    sizes = g.square().sum(-1)
    most = largest * sizes.sort().values[(len(sizes) - 1) // 2]
    return torch.stack(
        [x * (most / size).sqrt() if size > most else x for x, size in zip(g, sizes, strict=True)]
    )


@pytest.mark.parametrize("largest", [1.0, 10.0])
@pytest.mark.parametrize("name", NAMES)
def test_couplings_are_second_moments_of_the_gradients_of_each_head(
    name: str, largest: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 1, half of the tokens have larger gradients than one may have."""
    monkeypatch.setattr(moments, "LARGEST", largest)
    monkeypatch.setattr(end_losses, "POSITIONS", 4)
    model, ids = make_model(name, torch.float32), make_ids(3)
    source = open_stream(save(model, tmp_path))
    family = family_of(model.config)
    layouts = family.layouts(model.config)
    found = dict(couplings(source, ids, layouts, seed=SEED))
    family.unfuse(model)
    inner, _ = _whole_model(model, ids)
    assert sorted(found) == list(range(len(layouts)))
    for block, layout in enumerate(layouts):
        expected = {p.name for p in layout.projections if p.role is not Role.VALUE and p.expert is None}
        assert found[block].keys() == expected
        for p in (p for p in layout.projections if p.name in expected):
            g = torch.cat([limited(x, largest) for x in inner[f"{family.block_prefix(block)}{p.module}"]])
            if p.fused[1] > 1:
                g = g.view(len(g), -1, p.fused[1], layout.head_dim)[:, :, p.fused[0]].flatten(1)
            heads = {Role.QUERY: layout.heads, Role.KEY: layout.key_value_heads}.get(p.role, 1)
            by_head = g.view(len(g), heads, -1)
            G = torch.einsum("nhi,nhj->hij", by_head, by_head)
            G /= G.diagonal(dim1=1, dim2=2).mean()
            torch.testing.assert_close(found[block][p.name].float(), G, rtol=1e-3, atol=1e-4)


def test_each_expert_has_the_inputs_that_were_routed_to_it(tmp_path: Path) -> None:
    model, ids = make_model("mixtral", torch.float32), make_ids(3)
    found = seen(model, ids, tmp_path)
    layout = family_of(model.config).layouts(model.config)[0]
    gates = [f"0.{p.name}" for p in layout.projections if p.expert is not None and "gate" in p.name]
    used = [found[key].inputs for key in gates if key in found]
    assert len(used) > 1
    assert not any(torch.equal(used[0], other) for other in used[1:])


@pytest.mark.parametrize("key", ["0.down_proj", "1.v_proj", "2.q_proj", "None.head"])
def test_prediction_is_near_the_divergence_of_a_model_with_that_error(key: str, tmp_path: Path) -> None:
    """It is 0.9 to 1.4 of it, because inputs and gradients, and those of two tokens, are not independent."""
    model, ids = make_model("llama", torch.float32), make_ids(100)
    found = seen(model, ids, tmp_path)[key]
    assert found.inputs is not None
    block, _, name = key.partition(".")
    paths = {"down_proj": "mlp", "v_proj": "self_attn", "q_proj": "self_attn"}
    path = "lm_head" if name == "head" else f"model.layers.{block}.{paths[name]}.{name}"
    weight = model.get_parameter(f"{path}.weight")
    with torch.no_grad():
        expected = log_softmax(logits_of(model, ids), -1)
        ratios = []
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            dW = 0.01 * weight.std() * torch.randn(weight.shape, generator=generator)
            H, g = found.inputs, found.gradients
            predicted = 0.5 * float((g * torch.einsum("ri,ij,rj->r", dW, H, dW)).sum())
            weight += dW
            got = log_softmax(logits_of(model, ids).double(), -1)
            weight -= dW
            measured = float((expected.exp() * (expected - got)).sum(-1).mean())
            ratios.append(measured / predicted)
    assert sum(ratios) / len(ratios) == pytest.approx(1.1, abs=0.5)


def test_activations_that_overflow_are_named_with_what_to_do(tmp_path: Path) -> None:
    model = make_model("llama", torch.float32)
    with torch.no_grad():
        for name, factor in (("down_proj", 4e4), ("up_proj", 30)):  # within the range of float16
            for block in range(len(model.model.layers)):
                model.get_parameter(f"model.layers.{block}.mlp.{name}.weight").mul_(factor)
    source = open_stream(save(model, tmp_path), torch.float16)
    with pytest.raises(UserError, match=r"overflow in float16: continue with --model\.dtype bfloat16"):
        list(end_loss(source, make_ids(2), seed=SEED))
    with pytest.raises(UserError, match="the head's inputs have NaN or infinite values"):
        head_input(source, make_ids(2))
