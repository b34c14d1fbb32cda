"""Projections and blocks with bits of their own, from the grid to the files of a run."""

from pathlib import Path
from typing import Any

import pytest
import torch

from aespa_pl.planning.partition import WHOLE, Partition
from aespa_pl.settings import QuantizationSettings
from tests.walk.test_tuning import BOTH, LEARNED
from tests.walks import Quantized, same_files, walk

CASES = {
    "opt": {"fc2": 4, "1": 3, "1.v_proj": 2},
    "bloom": {"dense": 4, "1": 3, "1.dense_h_to_4h": 2},
    "llama": {"down_proj": 4, "1": 3, "1.v_proj": 2},
}
METHODS: dict[str, dict[str, Any]] = {
    "rtn": {"method": "rtn"},
    "awq": {"method": "awq"},
    "aespa": {"method": "aespa", "rounding.iterations": 12},
    "aespa-fast": {"method": "aespa-fast"},
    "tuned": {"method": "aespa-fast", **BOTH, **LEARNED},
    "clipping": {"method": "omniquant", "tuning.blocks.epochs": 2, "tuning.held_back": 0.3},
}

FAMILIES = ("aespa-fast", "tuned")
"""Methods that run on every family; the others differ from them in steps that know no family."""

POLISHED: dict[str, Any] = {"method": "aespa-fast", "polish.enabled": True}


def wanted(bits_of: dict[str, int], block: int, projection: str) -> int:
    """Return the bits of a projection where no block has fewer than a projection's name says."""
    exact = bits_of.get(f"{block}.{projection}")
    return exact or max(bits_of.get(projection, 2), bits_of.get(str(block), 2))


def assert_bits(found: Quantized, bits_of: dict[str, int]) -> None:
    """Each projection uses its whole range, and the model's weights are ``scale * (q - z)``."""
    state = found.exported().state_dict()
    for block in range(2):
        tensors = found.file(block)
        for p in found.layout.projections:
            largest = 2 ** wanted(bits_of, block, p.name) - 1
            q, scale, zero = (
                tensors[f"{p.name}.{what}"].double() for what in ("integers", "scale", "zero_point")
            )
            assert int(q.max()) == largest, (block, p.name)
            assert int(q.min()) == 0
            weight = state[f"{found.blocks_path}.{block}.{p.module}.weight"].double()
            if p.fused == (0, 1):
                torch.testing.assert_close(weight, scale * (q - zero), rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("name", "method"), [(name, m) for name in CASES for m in METHODS if name == "opt" or m in FAMILIES]
)
def test_every_projection_has_its_bits(name: str, method: str, tmp_path: Path) -> None:
    found = walk(name, tmp_path, {"bits_of": CASES[name], **METHODS[method]})
    assert_bits(found, CASES[name])


@pytest.mark.parametrize("bits_of", [{"q_proj": 4}, {"k_proj": 4}])
def test_query_and_key_of_other_bits_are_polished_in_their_own_range(
    bits_of: dict[str, int], tmp_path: Path
) -> None:
    assert_bits(walk("opt", tmp_path, {"bits_of": bits_of, **POLISHED}), bits_of)


def test_the_same_bits_by_another_way_give_the_same_integers(tmp_path: Path) -> None:
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    ways: list[dict[str, Any]] = [
        {"bits": 3},
        {"bits_of": {"0": 3, "1": 3}},
        {"bits_of": dict.fromkeys(names, 3)},
        {"bits": 8, "bits_of": {f"{block}.{name}": 3 for block in (0, 1) for name in names}},
    ]
    first, *others = (
        walk("llama", tmp_path / str(i), {**METHODS["aespa-fast"], **way}) for i, way in enumerate(ways)
    )
    for other in others:
        same_files(other, first)


@pytest.mark.parametrize(
    ("bits_of", "expected"),
    [
        ({}, 2),
        ({"v_proj": 4}, 4),
        ({"3": 5}, 5),
        ({"v_proj": 4, "3": 5}, 5),
        ({"v_proj": 5, "3": 4}, 5),
        ({"3.v_proj": 3, "v_proj": 5, "3": 4}, 3),
        ({"*.v_*": 5, "3": 4}, 5),
        ({"[0-2].*": 5, "?.v_proj": 4}, 4),
        ({"k_proj": 4, "2": 5, "3.k_proj": 6, "30": 7}, 2),
    ],
)
def test_the_most_exact_key_counts_then_the_largest(bits_of: dict[str, int], expected: int) -> None:
    assert QuantizationSettings(bits=2, bits_of=bits_of).bits_for(3, "v_proj") == expected


KEPT = {
    "opt": {"v_proj": 16, "1.fc1": 16},
    "bloom": {"dense": 16, "1": 16},
    "llama": {"q_proj": 16, "up_proj": 16, "1": 16},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", KEPT)
def test_a_projection_of_16_bits_keeps_its_weights(name: str, method: str, tmp_path: Path) -> None:
    found = walk(name, tmp_path, {"bits_of": KEPT[name], "bits": 3, **METHODS[method]})
    state, original = found.exported().state_dict(), found.original.state_dict()
    for block in range(2):
        stored = {key.partition(".")[0] for key in found.file(block)}
        for p in found.layout.projections:
            weight = f"{found.blocks_path}.{block}.{p.module}.weight"
            kept = wanted(KEPT[name], block, p.name) == 16
            assert kept == (p.name not in stored)
            if p.fused == (0, 1):
                assert kept == torch.equal(state[weight], original[weight])


def test_outputs_are_corrected_where_all_other_projections_are_kept(tmp_path: Path) -> None:
    kept = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 16)
    changes = {"bits_of": kept, "bits": 3, "method": "optq", "input_correction": 0.5}
    for partition in (WHOLE, Partition(heads=1)):
        losses = walk("llama", tmp_path / str(partition), changes, partition=partition).losses(1)
        assert all("correction_damping" in of_one for of_one in losses.values())


def test_awq_with_a_kept_expert_beside_others_that_are_seen_in_another_pass(tmp_path: Path) -> None:
    kept = {"expert_0_gate_proj": 16, "expert_0_up_proj": 16}
    changes = {"bits_of": kept, "bits": 3, "method": "awq"}
    one, whole = (
        walk("qwen3-moe", tmp_path / str(p), changes, partition=p) for p in (Partition(experts=1), WHOLE)
    )
    same_files(one, whole)


def test_a_block_that_is_kept_is_the_originals_whatever_type_blocks_run_in(tmp_path: Path) -> None:
    changes = {"bits_of": {"1": 16}, "bits": 3, "method": "rtn"}
    found = walk("llama", tmp_path, changes, dtype=torch.bfloat16)
    state = found.exported().state_dict()
    for name, original in found.original.state_dict().items():
        if f"{found.blocks_path}.1." in name:
            assert torch.equal(state[name], original), name
