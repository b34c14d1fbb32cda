"""What a walk has left is read and computed once more by hand: weights, inputs and integers."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from aespa_pl.models.family import Projection
from tests.walks import BLOCKS, Quantized

FAMILIES = ["opt", "opt-350m", "bloom", "llama", "llama-grouped", "qwen3"]
OFF = {"grid.zfold": False}
NOT_LEARNED = {"method": "aespa-fast"}
every_family = pytest.mark.parametrize("name", FAMILIES)
Walked = Callable[..., Quantized]


def rows(weight: Tensor, projection: Projection, quantized: Quantized) -> Tensor:
    """Return a projection's rows of its module's weight, copied one by one."""
    part, parts = projection.fused
    if parts == 1:
        return weight
    size = quantized.layout.head_dim
    heads = range(quantized.layout.heads)
    return torch.stack([weight[(head * parts + part) * size + i] for head in heads for i in range(size)])


def module_weight(model: PreTrainedModel, quantized: Quantized, index: int, path: str) -> Tensor:
    weight: Tensor = model.get_parameter(f"{quantized.blocks_path}.{index}.{path}.weight")
    return weight.detach()


def weight(model: PreTrainedModel, quantized: Quantized, index: int, projection: Projection) -> Tensor:
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
            kinds = ("integers", "scale", "zero_point")
            integers, scale, zero = (tensors[f"{projection.name}.{kind}"] for kind in kinds)
            assert (integers.dtype, scale.dtype, zero.dtype) == (torch.uint8, torch.float16, torch.uint8)
            assert int(integers.max()) <= 2**bits - 1
            assert len(integers.unique()) > 2 ** (bits - 1)  # the range is made use of
            found = weight(model, quantized, index, projection)
            # exact: 11 bits of a scale times 8 of an integer fit float32
            assert torch.equal(found, dequantized(tensors, projection.name).to(dtype))


def inputs_of_block(quantized: Quantized, index: int, *, original: bool = False) -> dict[str, Tensor]:
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


POLISH = {"polish.enabled": True}
CORRECT = {"input_correction": 0.5}
NEAREST = {**NOT_LEARNED, "optq.enabled": False, "objective.value": "layer"}


def differing(a: Quantized, b: Quantized, index: int = 0) -> set[str]:
    """Return the projections of a block whose tensors differ in any way."""
    one, two = a.file(index), b.file(index)
    assert one.keys() == two.keys()
    return {key.split(".")[0] for key in one if not torch.equal(one[key], two[key])}
