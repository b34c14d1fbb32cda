"""The exported weights are what the block files say, and the rest is the original's."""

from pathlib import Path

import pytest
import torch
from torch import nn

from aespa_pl.models.family import FoldIntoNorm
from aespa_pl.models.streamed import StreamedModel
from aespa_pl.storage.batches import Batches
from tests.models.examples import make_model
from tests.walk.by_hand import NOT_LEARNED, OFF, Walked, check_export, every_family, module_weight
from tests.walks import BLOCKS, shortened, walk


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


@pytest.mark.parametrize("tuned", [False, True])
def test_a_quantized_block_routes_tokens_in_float32(
    *, tuned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In half precision it might choose other experts than the original."""
    types, advance = set[torch.dtype](), StreamedModel.advance

    def watched(source: StreamedModel, block: nn.Module, batches: Batches) -> None:
        types.add(block.get_parameter("mlp.gate.wg.weight").dtype)
        assert block.get_parameter("mlp.shared_mlp.up_proj.weight").dtype == torch.bfloat16
        advance(source, block, batches)

    monkeypatch.setattr(StreamedModel, "advance", watched)
    changes = {**NOT_LEARNED, "tuning.blocks.enabled": tuned, "tuning.blocks.epochs": 1}
    walk("hunyuan-moe", tmp_path, changes | {"tuning.held_back": 0.3}, dtype=torch.bfloat16)
    assert types == {torch.float32}


@pytest.mark.parametrize("tuned", [False, True])
def test_stored_values_are_rounded_once_where_blocks_run_in_another_type(
    *, tuned: bool, tmp_path: Path
) -> None:
    """A float16 checkpoint runs in bfloat16, which has 3 bits less: the files have them all the same."""
    torch.manual_seed(1)
    model = shortened(make_model("llama-grouped", torch.float16))
    changes = {**NOT_LEARNED, "tuning.blocks.enabled": tuned, "tuning.blocks.epochs": 1}
    changes |= {"tuning.held_back": 0.3}
    quantized = walk("llama-grouped", tmp_path, changes, model=model, dtype=torch.bfloat16)
    check_export(quantized, 2, torch.float16)
    state, norms = quantized.exported(torch.float16).state_dict(), 0
    for index in range(BLOCKS):
        for group in quantized.layout.groups:
            if isinstance(group.fold, FoldIntoNorm) and not tuned:
                name = f"{quantized.blocks_path}.{index}.{group.fold.module}.weight"
                zeta = quantized.file(index)[f"{group.name}.zeta"]
                exact = model.state_dict()[name].float() * zeta
                assert torch.equal(state[name], exact.half())
                norms += 1
    assert tuned or norms == 2 * BLOCKS


@pytest.mark.parametrize(("name", "bits"), [("opt", 2), ("bloom", 3), ("opt", 4), ("bloom", 8)])
def test_bits_give_the_range_of_the_integers(name: str, bits: int, walked: Walked) -> None:
    check_export(walked(name, {"bits": bits}), bits)


@pytest.mark.parametrize("bits", [2, 4])
def test_symmetric_fixes_the_zero_point(bits: int, walked: Walked) -> None:
    for symmetric in (True, False):
        quantized = walked("opt", {**NOT_LEARNED, "bits": bits, "symmetric": symmetric})
        check_export(quantized, bits)
        zeros = torch.cat([t.flatten() for k, t in quantized.file(0).items() if k.endswith("zero_point")])
        assert bool((zeros == 2 ** (bits - 1)).all()) is symmetric


def test_group_size_gives_each_group_a_scale(walked: Walked) -> None:
    quantized = walked("llama-grouped", {"group_size": 4})
    check_export(quantized, bits=2)
    for p in quantized.layout.projections:
        tensors = quantized.file(1)
        shape = tensors[f"{p.name}.integers"].shape
        assert tensors[f"{p.name}.scale"].shape == (shape[0], shape[1] // 4)
        assert len(tensors[f"{p.name}.scale"][0].unique()) > 1


@pytest.mark.parametrize("name", ["opt", "bloom", "llama-grouped"])
def test_zfold_off_leaves_zeta_1_and_norms_alone(name: str, walked: Walked) -> None:
    for changes, fitted in (({}, True), (OFF, False)):
        quantized = walked(name, changes)
        zetas = [t for k, t in quantized.file(0).items() if k.endswith(".zeta")]
        assert len(zetas) == sum(group.fold is not None for group in quantized.layout.groups)
        assert all(bool((zeta > 0).all()) for zeta in zetas)
        assert any(bool((zeta != 1).all()) for zeta in zetas) is fitted
        assert all(bool((zeta == 1).all()) for zeta in zetas) is not fitted
        folds = [group.fold for group in quantized.layout.groups]
        norms = [fold.module for fold in folds if isinstance(fold, FoldIntoNorm)]
        exported = quantized.exported()
        changed = [
            not torch.equal(*(module_weight(m, quantized, 0, norm) for m in (quantized.original, exported)))
            for norm in norms
        ]  # a zeta of 1 may be the best of a group
        assert any(changed) is fitted
