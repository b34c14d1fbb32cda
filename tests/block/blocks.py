"""The tests of a block share small ones, with random statistics, at each of their steps."""

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from aespa_pl.block.grids import fit_grids
from aespa_pl.block.integers import update
from aespa_pl.block.quantized import QuantizedBlock, QuantizedProjection
from aespa_pl.calibration.statistics import BlockStatistics, Hessian
from aespa_pl.distributed.processes import ALONE, World
from aespa_pl.models import family_of
from aespa_pl.models.family import BlockLayout, FoldIntoRows
from aespa_pl.resolve import resolved
from aespa_pl.settings import GridSettings, QuantizationSettings
from tests.models.examples import make_ours

QUICK = GridSettings(max_rounds=2)
"""Enough for a zeta that is not 1."""
FEW = resolved(QuantizationSettings(grid=QUICK))
LEARNED = resolved(QuantizationSettings(method="aespa", grid=QUICK))
"""The same with a rounding that is learned."""
ROLES = {"q_proj": "query", "k_proj": "key", "v_proj": "value"}
"""Names of all families but BLOOM, whose projections are called as their roles are."""


def example(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, BlockLayout]:
    """Return the first block of an example and its layout."""
    model = make_ours(name, dtype)
    family = family_of(model.config)
    return model.get_submodule(family.blocks_path)[0], family.layout(model.config)


def linear(block: nn.Module, module: str) -> nn.Linear:
    found = block.get_submodule(module)
    assert isinstance(found, nn.Linear)
    return found


def second_moment(size: int, *heads: int) -> Tensor:
    X = torch.randn(*heads, size, 3 * size) * (0.2 + torch.rand(size, 1))
    return X @ X.transpose(-1, -2) * 2 / (3 * size)


def make_statistics(
    block: nn.Module,
    layout: BlockLayout,
    *,
    value: bool = True,
    query_key: bool = True,
    change: Callable[[dict[str, Tensor]], object] = lambda _: None,
) -> BlockStatistics:
    """Return random statistics, each different from all others.

    Args:
        block: The block that they are for.
        layout: Its layout.
        value: With H_V.
        query_key: With G_Q and G_K.
        change: Changes the matrices by name: those of the inputs, and H_V under "attended".
    """
    size = {
        name: linear(block, projections[0].module).in_features
        for group in layout.groups
        for name, projections in group.inputs.items()
    }
    d, d_h = size["attention_input"], layout.head_dim
    matrices = {name: second_moment(columns) for name, columns in size.items()}
    matrices["attended"] = second_moment(d, layout.key_value_heads)
    change(matrices)
    return BlockStatistics(
        {name: Hessian(matrices[name][None]) for name in size},
        Hessian(matrices["attended"]) if value else None,
        second_moment(d_h, layout.heads) if query_key else None,
        second_moment(d_h, layout.key_value_heads) if query_key else None,
        tokens=4096,
    )


def begin(
    block: nn.Module,
    layout: BlockLayout,
    statistics: BlockStatistics,
    settings: QuantizationSettings = FEW,
    damping: float | Literal["auto"] = 0.01,
) -> QuantizedBlock:
    quantized = QuantizedBlock.begin(0, block, layout, statistics, settings)
    quantized.damp(damping)
    quantized.clear_dead_columns()
    return quantized


def make_block(name: str, settings: QuantizationSettings = FEW) -> QuantizedBlock:
    block, layout = example(name)
    return begin(block, layout, make_statistics(block, layout), settings)


def gridded(name: str, settings: QuantizationSettings = FEW, world: World = ALONE) -> QuantizedBlock:
    """Return a block after step 2; the same name gives the same weights and statistics."""
    torch.manual_seed(1)
    block = make_block(name, settings)
    fit_grids(block, settings, world)
    return block


def updated(block: QuantizedBlock, settings: QuantizationSettings = FEW) -> QuantizedBlock:
    """Run steps 2 and 3."""
    fit_grids(block, settings, ALONE)
    update(block, ALONE)
    return block


def role(name: str) -> str:
    return ROLES.get(name, name if name in ROLES.values() else "other")


def rows_by_hand(block: nn.Module, layout: BlockLayout, name: str, module: str) -> Tensor:
    """Return a projection's weight ``[heads, rows, d_in]``, row by row."""
    weight = linear(block, module).weight
    size = layout.head_dim
    heads = {"query": layout.heads, "key": layout.key_value_heads, "value": layout.key_value_heads}
    if layout.latent or role(name) not in heads:
        if module.endswith(("gate_up_proj", "input_linear")):
            gate, up = weight.chunk(2)
            weight = gate if name == "gate_proj" else up
        if name == "q_gate":
            weight = weight.view(layout.heads, 2, size, -1)[:, 1].flatten(0, 1)
        return weight[None].float()
    if layout.gated and role(name) == "query":  # of each head the query, and then its gate
        return weight.view(layout.heads, 2, size, -1)[:, 0].float()
    fused = module.endswith("query_key_value")
    parts, part = (3, ["query", "key", "value"].index(name)) if fused else (1, 0)
    first = 0
    if module.endswith("qkv_proj"):  # all queries, then all keys, then all values
        before = {"query": 0, "key": layout.heads, "value": layout.heads + layout.key_value_heads}
        first = before[role(name)] * size
    rows = [
        weight[first + (head * parts + part) * size + i] for head in range(heads[role(name)])
        for i in range(size)
    ]  # fmt: skip
    return torch.stack(rows).view(heads[role(name)], size, -1).float()


def next_zeta(layout: BlockLayout, prepared: Mapping[str, QuantizedProjection], name: str) -> Tensor:
    """Return the factor ``[heads, rows, 1]`` that the next group folds into a projection's rows."""
    W = prepared[name].weight
    for group in layout.groups:
        if group.fold == FoldIntoRows(name):
            return prepared[group.projections[0].name].grid.zeta.double().view(*W.shape[:2], 1)
    return torch.ones(*W.shape[:2], 1, dtype=torch.float64)
