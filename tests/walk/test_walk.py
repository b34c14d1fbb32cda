"""A walk over a whole model stores what it did, and each switch does what it says."""

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from aespa_pl.errors import NumericalError, UserError
from aespa_pl.models.family import FoldIntoNorm, Projection
from aespa_pl.planning.partition import Portion
from aespa_pl.resolve import resolved
from aespa_pl.run.journal import Run
from tests.models.examples import VOCABULARY, make_ids, make_model
from tests.reference import optq_row
from tests.walks import BASE, BLOCKS, Quantized, changed, shortened, walk

FAMILIES = ["opt", "opt-350m", "bloom", "llama", "llama-grouped", "qwen3"]
OFF = {"grid.zfold": False}
NOT_LEARNED = {"method": "aespa-fast"}
every_family = pytest.mark.parametrize("name", FAMILIES)
Walked = Callable[..., Quantized]


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Walked:
    """Does the walks of this module, each once, in whichever words the settings are."""
    done: dict[str, Quantized] = {}

    def get(name: str, changes: dict[str, Any] | None = None) -> Quantized:
        key = f"{name} {resolved(changed(changes or {}))}"
        if key not in done:
            done[key] = walk(name, tmp_path_factory.mktemp(name), changes)
        return done[key]

    return get


def rows(weight: Tensor, projection: Projection, quantized: Quantized) -> Tensor:
    """Return a projection's rows of its module's weight, copied one by one."""
    part, parts = projection.fused
    if parts == 1:
        return weight
    size = quantized.layout.head_dim
    heads = range(quantized.layout.heads)
    return torch.stack(
        [weight[(head * parts + part) * size + i] for head in heads for i in range(size)]
    )


def module_weight(model: PreTrainedModel, quantized: Quantized, index: int, path: str) -> Tensor:
    weight: Tensor = model.get_parameter(f"{quantized.blocks_path}.{index}.{path}.weight")
    return weight.detach()


def weight(
    model: PreTrainedModel, quantized: Quantized, index: int, projection: Projection
) -> Tensor:
    """Return the weight ``[rows, columns]`` of a projection of a model."""
    return rows(module_weight(model, quantized, index, projection.module), projection, quantized)


def dequantized(tensors: dict[str, Tensor], name: str) -> Tensor:
    """Return ``scale * (integers - zero point)``, group by group."""
    integers = tensors[f"{name}.integers"].float()
    scale, zero = tensors[f"{name}.scale"].float(), tensors[f"{name}.zero_point"].float()
    size = integers.shape[1] // scale.shape[1]
    parts = [
        scale[:, g, None] * (integers[:, g * size : (g + 1) * size] - zero[:, g, None])
        for g in range(scale.shape[1])
    ]
    return torch.cat(parts, dim=1)


def check_export(quantized: Quantized, bits: int, dtype: torch.dtype = torch.float32) -> None:
    model = quantized.exported(dtype)
    for index in range(BLOCKS):
        tensors = quantized.file(index)
        for projection in quantized.layout.projections:
            integers = tensors[f"{projection.name}.integers"]
            assert integers.dtype == torch.uint8
            assert int(integers.max()) <= 2**bits - 1
            assert len(integers.unique()) > 2 ** (bits - 1)  # the range is made use of
            found = weight(model, quantized, index, projection)
            # exact: 11 bits of a scale times 8 of an integer fit float32
            assert torch.equal(found, dequantized(tensors, projection.name).to(dtype))


@every_family
def test_exported_weights_are_what_the_block_files_say(name: str, walked: Walked) -> None:
    quantized = walked(name)
    check_export(quantized, bits=2)
    files = sorted(path.name for path in (quantized.run.folder / "blocks").iterdir())
    assert files == [f"block_{index:03}.safetensors" for index in range(BLOCKS)]


@every_family
def test_what_is_not_quantized_is_the_originals_with_zeta_in_it(name: str, walked: Walked) -> None:
    quantized = walked(name)
    expected = {k: v.clone() for k, v in quantized.original.state_dict().items()}
    for index in range(BLOCKS):
        prefix, tensors = f"{quantized.blocks_path}.{index}", quantized.file(index)
        for group in quantized.layout.groups:
            for p in group.projections:
                expected.pop(f"{prefix}.{p.module}.weight", None)
                bias = expected.get(f"{prefix}.{p.module}.bias")
                factor = quantized.row_factor(index, p)[:, 0]
                if bias is not None and factor.numel() > 1:
                    if p.fused[1] == 1:
                        bias *= factor
                    else:  # of BLOOM's rows ``[heads, 3, d_head]`` the values
                        bias.view(-1, 3, quantized.layout.head_dim)[:, 2] *= factor.view(
                            -1, quantized.layout.head_dim
                        )
            if isinstance(group.fold, FoldIntoNorm):
                for kind in ("weight", "bias"):
                    norm = expected.get(f"{prefix}.{group.fold.module}.{kind}")
                    if norm is not None:
                        norm *= tensors[f"{group.name}.zeta"]
    found = quantized.exported().state_dict()
    assert len(expected) > BLOCKS
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-6, atol=0, msg=key)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_keep_the_type_of_the_checkpoint(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = shortened(make_model("llama-grouped", dtype))
    check_export(walk("llama-grouped", tmp_path, NOT_LEARNED, model=model), 2, dtype)


@pytest.mark.parametrize(("name", "bits"), [("opt", 2), ("bloom", 3), ("opt", 4), ("bloom", 8)])
def test_bits_give_the_range_of_the_integers(name: str, bits: int, walked: Walked) -> None:
    check_export(walked(name, {"bits": bits}), bits)


@pytest.mark.parametrize("bits", [2, 4])
def test_symmetric_fixes_the_zero_point(bits: int, walked: Walked) -> None:
    for symmetric in (True, False):
        quantized = walked("opt", {**NOT_LEARNED, "bits": bits, "symmetric": symmetric})
        check_export(quantized, bits)
        zeros = torch.cat(
            [t.flatten() for k, t in quantized.file(0).items() if k.endswith("zero_point")]
        )
        assert bool((zeros == 2 ** (bits - 1)).all()) is symmetric


def test_group_size_gives_each_group_a_scale(walked: Walked) -> None:
    quantized = walked("llama-grouped", {"group_size": 4})
    check_export(quantized, bits=2)
    for p in quantized.layout.projections:
        tensors = quantized.file(1)
        shape = tensors[f"{p.name}.integers"].shape
        assert tensors[f"{p.name}.scale"].shape == (shape[0], shape[1] // 4)
        assert len(tensors[f"{p.name}.scale"][0].unique()) > 1


def inputs_of_block(
    quantized: Quantized, index: int, *, original: bool = False
) -> dict[str, Tensor]:
    """Return ``X [N, d]`` of each group: the block is the original's, what is before it is not.

    Args:
        quantized: The walk.
        index: Of the block.
        original: What is before the block is the original's as well.
    """
    model = copy.deepcopy(quantized.original if original else quantized.exported())
    path = f"{quantized.blocks_path}.{index}"
    block = model.get_submodule(path)
    block.load_state_dict(quantized.original.get_submodule(path).state_dict())
    seen: dict[str, Tensor] = {}
    for group in quantized.layout.groups:

        def keep(_module: object, inputs: tuple[Tensor, ...], name: str = group.name) -> None:
            seen[name] = inputs[0].flatten(0, -2).double()

        block.get_submodule(group.projections[0].module).register_forward_pre_hook(keep)
    model(quantized.ids, use_cache=False)
    return seen


def without_dead(W: Tensor, X: Tensor) -> Tensor:
    """Return the weight in float64, 0 where the input always is (behind a ReLU)."""
    return W.double() * (X != 0).any(dim=0)


def nearest(quantized: Quantized, index: int, p: Projection, W: Tensor) -> Tensor:
    """Return the integers nearest to a weight in float64, on the grid that a walk has found."""
    tensors = quantized.file(index)
    folded = W * quantized.row_factor(index, p).double() / quantized.zeta(index, p).double()
    scale, zero = (tensors[f"{p.name}.{kind}"].double() for kind in ("scale", "zero_point"))
    return (torch.round(folded / scale) + zero).clamp(0, 3)


def damped_hessian(X: Tensor) -> Tensor:
    H = 2 / X.shape[0] * X.T @ X
    H += torch.diag((H.diagonal() == 0) / 2048)  # dead inputs
    return H + 0.01 * H.diagonal().mean() * torch.eye(H.shape[0], dtype=H.dtype)


@every_family
def test_losses_are_those_of_the_model_on_disk(name: str, walked: Walked) -> None:
    """Unfold the exported weights, and measure them on what the quantized blocks before them give."""
    quantized = walked(name, {"objective.value": "layer", "objective.query_key": "layer"})
    exported = quantized.exported()
    for index in range(BLOCKS):
        inputs = inputs_of_block(quantized, index)
        for p in quantized.layout.projections:
            X = inputs[quantized.group(p).name]
            unfolded = weight(exported, quantized, index, p) / quantized.row_factor(index, p)
            W = without_dead(weight(quantized.original, quantized, index, p), X)
            error = unfolded.double() * quantized.zeta(index, p) - W
            expected = float((error @ damped_hessian(X) * error).sum())
            # float32 hidden states through up to three blocks
            assert quantized.losses(index)[p.name]["final"] == pytest.approx(expected, rel=1e-3)


@every_family
def test_learned_rounding_is_never_worse_than_optqs(name: str, walked: Walked) -> None:
    quantized, better = walked(name), 0
    for index in range(BLOCKS):
        losses = quantized.losses(index)
        assert losses.keys() == {p.name for p in quantized.layout.projections}
        for loss in losses.values():
            assert loss["final"] <= loss["optq"] * (1 + 1e-6)  # float32 sums
            better += loss["final"] < 0.999 * loss["optq"]
    assert better > BLOCKS


def test_keep_best_takes_the_better_of_learned_and_optq(walked: Walked) -> None:
    rough = {"rounding.learning_rate": 3.0, "rounding.penalty_other": 50.0}
    learned = walked("opt", {**rough, "rounding.keep_best": False}).losses(0)
    best = walked("opt", rough).losses(0)
    worse = better = 0
    for name, loss in best.items():
        assert loss["final"] <= min(loss["optq"], learned[name]["final"]) * (1 + 1e-6)
        assert learned[name]["optq"] == loss["optq"]
        worse += learned[name]["final"] > loss["optq"]
        better += loss["final"] < 0.999 * loss["optq"]
    assert worse  # else there was nothing to choose
    assert better


POLISH = {"polish.enabled": True}
CORRECT = {"input_correction": 0.5}
NEAREST = {**NOT_LEARNED, "optq.enabled": False, "objective.value": "layer"}


@pytest.mark.parametrize(
    ("method", "learned"),
    [("aespa", 6), ("aespa-hybrid", 3), ("aespa-fast", 0)],
)
def test_method_says_which_projections_learn(method: str, learned: int, walked: Walked) -> None:
    """The others keep OPTQ's integers; learning moves some of each of the learned ones."""
    quantized, plain = walked("opt", {"method": method}), walked("opt", NOT_LEARNED)
    names = [p.name for p in quantized.layout.projections]
    assert names[:3] == ["q_proj", "k_proj", "v_proj"]
    assert differing(plain, quantized) == set(names[:learned])


@every_family
def test_correction_aims_at_the_output_of_the_original_model(name: str, walked: Walked) -> None:
    """The first projections of block 1 are corrected by least squares on their inputs in both models.

    Block 0 has nothing to make up for. With nearest rounding on the grid that was found, the
    integers of the second tell what their target was.
    """
    off, on = walked(name, NEAREST), walked(name, {**NEAREST, **CORRECT})
    assert differing(off, on) == set()
    assert differing(off, on, 1)
    group = on.layout.groups[0]
    X, original = (inputs_of_block(on, 1, original=kind)[group.name] for kind in (False, True))
    H = damped_hessian(X)
    shift = (original - X).T @ X * 2 / X.shape[0]
    tensors = on.file(1)
    for p in group.projections:
        W = weight(on.original, on, 1, p).double()
        target = W + 0.5 * W @ shift @ torch.linalg.inv(H)
        integers = nearest(on, 1, p, without_dead(target, X))
        assert float((integers == tensors[f"{p.name}.integers"]).double().mean()) > 0.99
        assert not torch.equal(nearest(on, 1, p, W), integers)


def test_hidden_states_on_disk_give_the_same(walked: Walked, tmp_path: Path) -> None:
    """The correction has two streams of them."""
    changes = {**CORRECT, **NOT_LEARNED}
    expected = walked("llama-grouped", changes)
    found = walk("llama-grouped", tmp_path, changes, hidden_folder=tmp_path / "hidden")
    assert differing(expected, found) == differing(expected, found, 1) == set()
    assert list((tmp_path / "hidden").iterdir()) == []


class Precisions(Callback):
    """Remembers what the learning of each block multiplies in."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen.append(str(pl_module.precision))


@pytest.mark.parametrize("products", ["tf32", "bfloat16"])
def test_coarse_products_find_nearly_the_same(
    products: str, walked: Walked, tmp_path: Path
) -> None:
    rough = {"rounding.keep_best": False, "polish.enabled": False}
    exact = walked("opt", rough)
    precisions = Precisions()
    coarse = walk(
        "opt",
        tmp_path,
        {**rough, "products": products},
        options=lambda *_: {"callbacks": [precisions]},
    )
    assert precisions.seen == [products] * BLOCKS
    for name, loss in exact.losses(0).items():
        found = coarse.losses(0)[name]
        assert found["nearest"] != loss["nearest"]  # for statistics are rounded as well
        assert found["nearest"] == pytest.approx(loss["nearest"], rel=2**-10)
        assert found["optq"] == pytest.approx(loss["optq"], rel=0.1)
        assert found["final"] == pytest.approx(loss["final"], rel=0.2)


@pytest.mark.parametrize(
    ("name", "others"),
    [
        *((name, {}) for name in FAMILIES),
        ("opt", NOT_LEARNED),
        ("llama-grouped", {"group_size": 4}),
    ],
)
def test_polish_lowers_the_losses_and_never_raises_one(
    name: str, others: dict[str, Any], walked: Walked
) -> None:
    """Block 0 is the same with and without; block 1 sees the other hidden states."""
    off, on = walked(name, others), walked(name, {**others, **POLISH})
    check_export(on, bits=2)
    before = off.losses(0)
    changed = 0.0
    for index in range(BLOCKS):
        for projection, loss in on.losses(index).items():
            if index == 0:
                assert loss["before_polish"] == before[projection]["final"]
                assert loss["optq"] == before[projection]["optq"]
            assert loss["final"] <= loss["before_polish"]
            assert 1 <= loss["polish_passes"] <= 10
            if loss["polish_changed"]:
                assert loss["final"] < loss["before_polish"]
                assert loss["polish_passes"] > 1
        changed += sum(loss["polish_changed"] for loss in on.losses(index).values())
        total = {
            k: sum(x[k] for x in on.losses(index).values()) for k in ("before_polish", "final")
        }
        assert total["final"] < 0.97 * total["before_polish"]
    for projection in (p.name for p in on.layout.projections):
        one, two = (walk.file(0)[f"{projection}.integers"] for walk in (off, on))
        assert int((one != two).sum()) == on.losses(0)[projection]["polish_changed"]


@pytest.mark.parametrize("name", ["opt", "bloom", "llama-grouped"])
def test_zfold_off_leaves_zeta_1_and_norms_alone(name: str, walked: Walked) -> None:
    for changes, fitted in (({}, True), (OFF, False)):
        quantized = walked(name, changes)
        zetas = [t for k, t in quantized.file(0).items() if k.endswith(".zeta")]
        assert len(zetas) == sum(group.fold is not None for group in quantized.layout.groups)
        assert all(bool((zeta > 0).all()) for zeta in zetas)
        assert any(bool((zeta != 1).all()) for zeta in zetas) is fitted
        assert all(bool((zeta == 1).all()) for zeta in zetas) is not fitted
        norm = quantized.layout.groups[0].fold
        assert isinstance(norm, FoldIntoNorm)
        before = module_weight(quantized.original, quantized, 0, norm.module)
        after = module_weight(quantized.exported(), quantized, 0, norm.module)
        assert torch.equal(before, after) is not fitted


def test_zeta_is_only_where_it_can_be_folded(walked: Walked) -> None:
    zetas = {key for key in walked("opt-350m").file(0) if key.endswith(".zeta")}
    assert zetas == {f"{group}.zeta" for group in ("attention_output", "mlp_hidden")}


@every_family
def test_without_optq_and_learning_the_integers_are_the_nearest(name: str, walked: Walked) -> None:
    quantized = walked(name, NEAREST)
    for index in range(BLOCKS):
        tensors, inputs = quantized.file(index), inputs_of_block(quantized, index)
        for p in quantized.layout.projections:
            X = inputs[quantized.group(p).name]
            W = without_dead(weight(quantized.original, quantized, index, p), X)
            expected = nearest(quantized, index, p, W)
            assert torch.equal(expected, tensors[f"{p.name}.integers"].double())
            loss = quantized.losses(index)[p.name]
            assert loss["nearest"] == loss["optq"] == loss["final"]


def test_without_learning_the_integers_are_optqs(walked: Walked) -> None:
    quantized = walked("opt", {**OFF, **NOT_LEARNED})
    inputs, tensors = inputs_of_block(quantized, 0), quantized.file(0)
    for p in quantized.layout.projections:
        if p.role != "other":
            continue
        X = inputs[quantized.group(p).name]
        H, W = damped_hessian(X), without_dead(weight(quantized.original, quantized, 0, p), X)
        for i in range(W.shape[0]):
            step = tensors[f"{p.name}.scale"][i].double().expand(W.shape[1])
            zero = tensors[f"{p.name}.zero_point"][i].double().expand(W.shape[1])
            _, integers = optq_row(W[i], H, step, zero, levels=3)
            assert torch.equal(integers, tensors[f"{p.name}.integers"][i].double())
    for loss in quantized.losses(0).values():
        assert loss["final"] == loss["optq"] != loss["nearest"]


def differing(a: Quantized, b: Quantized, index: int = 0) -> set[str]:
    """Return the projections of a block whose tensors differ in any way."""
    one, two = a.file(index), b.file(index)
    assert one.keys() == two.keys()
    return {key.split(".")[0] for key in one if not torch.equal(one[key], two[key])}


SWITCHES: list[tuple[str, dict[str, Any], dict[str, Any], set[str]]] = [
    ("opt", {"objective.value": "layer"}, OFF, {"v_proj"}),
    ("llama-grouped", {"objective.value": "layer"}, OFF, {"v_proj"}),
    ("bloom", {"objective.value": "layer"}, OFF, {"value"}),
    ("opt", {"objective.query_key": "layer"}, {}, {"q_proj", "k_proj"}),
    ("llama-grouped", {"objective.query_key": "layer"}, {}, {"q_proj", "k_proj"}),
    ("qwen3", {"objective.query_key": "layer"}, {}, {"q_proj", "k_proj"}),
    ("bloom", {"objective.query_key": "layer"}, {}, {"query", "key"}),
    ("opt", {"objective.query_key": "layer"}, NOT_LEARNED, set()),
    ("opt", {"rounding.penalty_attention": 90.0}, {}, {"q_proj", "k_proj", "v_proj"}),
    ("opt", {"rounding.penalty_other": 90.0}, {}, {"out_proj", "fc1", "fc2"}),
]


@pytest.mark.parametrize(("name", "switch", "others", "expected"), SWITCHES)
def test_switch_changes_what_it_names_and_nothing_else(
    name: str, switch: dict[str, Any], others: dict[str, Any], expected: set[str], walked: Walked
) -> None:
    off, on = walked(name, others), walked(name, {**others, **switch})
    assert differing(off, on) == expected
    if expected:
        assert differing(off, on, 1)  # which sees the other hidden states


@pytest.mark.parametrize(
    ("switch", "others"),
    [
        ({"grid.max_rounds": 1}, {}),
        ({"optq.enabled": False}, {}),
        (NOT_LEARNED, {}),
        ({"rounding.iterations": 3}, {}),
        ({"rounding.learning_rate": 0.01}, {}),
        ({"rounding.warmup": 0.9}, {"rounding.penalty_attention": 9.0}),
        ({"rounding.beta_start": 3.0}, {"rounding.penalty_attention": 9.0}),
        ({"rounding.beta_end": 19.0}, {"rounding.penalty_attention": 9.0}),
        ({"rounding.keep_best": False}, {}),
        ({"damping": 0.2}, {}),
        ({"polish.enabled": True}, {}),
        ({"polish.passes": 1}, {"polish.enabled": True}),
    ],
)
def test_switch_acts(switch: dict[str, Any], others: dict[str, Any], walked: Walked) -> None:
    one, two = walked("opt", others), walked("opt", {**others, **switch})
    integers = {key for key in one.file(0) if key.endswith(".integers")}
    assert any(not torch.equal(one.file(0)[key], two.file(0)[key]) for key in integers)


def test_what_was_measured_is_in_journal_and_block_file(walked: Walked) -> None:
    quantized = walked("opt")
    for index in range(BLOCKS):
        record = quantized.journal["blocks"][str(index)]
        with safe_open(quantized.run.block_file(index), "pt") as file:
            block = json.loads(file.metadata()["block"])
        assert block["losses"] == record["losses"]
        assert block["tuning"] is None  # these settings tune nothing
        for loss in record["losses"].values():
            assert loss.keys() == {
                "nearest", "optq", "final", "share_not_nearest", "extra_damping",
            }  # fmt: skip
        for phase in ("statistics", "grid", "optq", "rounding"):
            assert record["seconds"][phase] > 0
        shares = [x["final"] / x["nearest"] for x in record["losses"].values()]
        mean = sum(shares) / len(shares)
        assert f"block {index} of {BLOCKS}: loss {mean:.3f} of nearest" in quantized.said


@pytest.mark.parametrize(
    ("name", "changes"),
    [("llama-grouped", {}), ("opt", CORRECT), ("bloom", CORRECT), ("llama-grouped", CORRECT)],
)
def test_block_after_replay_is_the_same(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """The inputs of block 1 come from the block in memory first, then from its file.

    With correction both streams go through the complete blocks again.
    """
    torch.manual_seed(1)
    model = shortened(make_model(name, torch.float16))  # the file holds less than float32 does
    first = walk(name, tmp_path, changes, model=model)
    tensors, losses = first.file(1), first.losses(1)
    run = Run.open(first.run.folder)
    del run.blocks[1]
    again = walk(name, tmp_path, changes, model=model, run=run)
    assert again.losses(1) == losses
    assert all(torch.equal(tensor, tensors[key]) for key, tensor in again.file(1).items())
    assert "1 of 2 blocks are complete already" in again.said


def test_what_polish_did_is_in_journal_and_printed(walked: Walked) -> None:
    quantized = walked("opt", POLISH)
    for index in range(BLOCKS):
        record = quantized.journal["blocks"][str(index)]
        losses = record["losses"].values()
        for loss in losses:
            assert loss.keys() == {
                "nearest", "optq", "final", "share_not_nearest", "extra_damping",
                "before_polish", "polish_passes", "polish_changed",
            }  # fmt: skip
        assert record["seconds"]["polish"] > 0
        changed = sum(x["polish_changed"] for x in losses)
        passes = max(x["polish_passes"] for x in losses)
        line = f"block {index} of {BLOCKS}: polish changed {changed} integers in {passes} passes; "
        assert line in quantized.said
    assert "polish" not in walked("opt").journal["blocks"]["0"]["seconds"]


class Stop(Callback):
    """Ends the second training."""

    def __init__(self) -> None:
        self.trainings = 0

    def options(self, _run: Run, _portion: Portion) -> dict[str, Any]:
        return {"callbacks": [self]}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.trainings += 1
        if self.trainings == 2:
            raise InterruptedError


def test_run_with_polish_goes_on_to_the_same_bits(tmp_path: Path, walked: Walked) -> None:
    with pytest.raises(InterruptedError):
        walk("opt", tmp_path, POLISH, options=Stop().options)
    run = Run.open(tmp_path / "runs" / "version_0")
    assert set(run.blocks) == {0}
    continued, whole = walk("opt", tmp_path, POLISH, run=run), walked("opt", POLISH)
    for index in range(BLOCKS):
        assert not differing(continued, whole, index)
        assert continued.losses(index) == whole.losses(index)


def overflowing(index: int) -> PreTrainedModel:
    """Return a model whose feed-forward overflows in one block; each weight is a finite number."""
    torch.manual_seed(0)
    model = shortened(make_model("opt", torch.float32))
    model.get_submodule(f"model.decoder.layers.{index}.fc1").weight.mul_(1e30)
    return model


@pytest.mark.parametrize("index", [0, 1])
def test_activations_that_overflow_are_refused_by_block(index: int, tmp_path: Path) -> None:
    message = rf"^block {index}: the statistic H of mlp_hidden has NaN or infinite .*float32"
    with pytest.raises(UserError, match=message):
        walk("opt", tmp_path, model=overflowing(index))
    assert len(Run.open(tmp_path / "runs" / "version_0").blocks) == index


class Poison(Callback):
    """Makes the rounding variables of a projection NaN in the first ``times`` trainings."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.trainings = 0

    def options(self, _run: Run, _portion: Portion) -> dict[str, Any]:
        return {"callbacks": [self]}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.trainings += 1
        if self.trainings <= self.times:
            dict(pl_module.named_parameters())["projections.fc1.variables"].data.fill_(torch.nan)


def test_block_that_diverges_is_done_again_with_more_damping(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, walked: Walked
) -> None:
    poison = Poison(times=1)
    with caplog.at_level(logging.WARNING):
        quantized = walk("opt", tmp_path, options=poison.options)
    assert poison.trainings == BLOCKS + 1
    assert "block 0: the loss of fc1 is not finite; again with damping 0.1" in caplog.messages
    assert quantized.journal["damping"] == {"0": 0.1}
    assert not differing(quantized, walked("opt", {"damping": 0.1}))
    # the blocks to come have the setting's damping again: block 1 differs from a walk with damping 0.1
    assert differing(quantized, walked("opt", {"damping": 0.1}), 1)


def test_block_that_diverges_twice_is_refused(tmp_path: Path) -> None:
    poison = Poison(times=9)
    message = "^block 0: the loss of fc1 is not finite; raise quantization.damping in a new run$"
    with pytest.raises(UserError, match=message):
        walk("opt", tmp_path, options=poison.options)
    assert poison.trainings == 2
    run = Run.open(tmp_path / "runs" / "version_0")
    with pytest.raises(UserError, match=message):  # continued: not with 100 times the damping
        walk("opt", tmp_path, options=poison.options, run=run)
    assert poison.trainings == 3


def test_learning_rate_without_bound_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^block 0: the loss of \w+ is not finite; raise"):
        walk("opt", tmp_path, {"rounding.learning_rate": 1e39, "rounding.keep_best": False})


def test_damping_that_a_factorization_needed_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, walked: Walked
) -> None:
    """One word over and over: the Hessians of the first block have rank 1."""
    ids = torch.full((2, 3), VOCABULARY // 2)
    with caplog.at_level(logging.WARNING):
        quantized = walk("llama", tmp_path, {**NOT_LEARNED, "damping": 1e-12}, ids=ids)
    needed = {k: v["extra_damping"] for k, v in quantized.losses(0).items() if v["extra_damping"]}
    assert "q_proj" in needed
    for name, share in needed.items():
        line = f"block 0, {name}: the update needed {share:g} of the Hessian's mean diagonal"
        assert any(message.startswith(line) for message in caplog.messages)
    assert all(v["extra_damping"] == 0 for v in walked("llama").losses(0).values())


def test_hessian_that_cannot_be_factored_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise NumericalError("no factor")

    monkeypatch.setattr("aespa_pl.block.update.update_weights", fail)
    with pytest.raises(
        UserError, match=r"^block 0, q_proj: no factor; raise quantization\.damping"
    ):
        walk("opt", tmp_path)


def test_these_tests_differ_from_the_package_in_five_settings() -> None:
    package: dict[str, object] = {"rounding.iterations": 2000, "rounding.learning_rate": 0.015}
    package |= {"polish.enabled": None, "input_correction": None, "method": "aespa-tuned"}
    assert changed(package) == type(BASE)()


@pytest.mark.parametrize(("segments", "few"), [(2, True), (40, False)])
def test_few_tokens_for_the_correction_are_spoken_of_once(
    segments: int, few: bool, tmp_path: Path
) -> None:
    changes = {**NOT_LEARNED, "input_correction": 0.5}
    said = walk("opt", tmp_path, changes, ids=make_ids(segments)).said
    assert said.count("calibration tokens are few for projections with up to 24 inputs") == few
