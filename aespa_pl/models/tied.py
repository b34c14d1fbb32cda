"""Find weights that a configuration ties and that files hold twice."""

import torch
from transformers import PreTrainedModel

from aespa_pl.models.headers import StoredTensor, opened


def shared(model: PreTrainedModel, tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Let names that the configuration ties share a tensor that files hold twice, unless values differ."""
    first, found = dict[int, StoredTensor](), dict[str, StoredTensor]()
    for name, parameter in model.state_dict(keep_vars=True).items():
        own = tensors[name]
        tied = first.setdefault(id(parameter), own)
        found[name] = tied if tied is own or (tied.dtype == own.dtype and _equal(tied, own)) else own
    return found


def _equal(one: StoredTensor, other: StoredTensor) -> bool:
    with opened(one.file) as file, opened(other.file) as second:
        return torch.equal(one.read(file), other.read(second))
