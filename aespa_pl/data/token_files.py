"""Read segments of token ids from a file, in place of a text."""

import os
from pathlib import Path

import torch
from jaxtyping import Int64
from safetensors import SafetensorError, safe_open
from torch import Tensor

from aespa_pl.errors import UserError

TENSOR = "tokens"
"""Name of the tensor in the file."""


def is_token_file(source: str) -> bool:
    """Tell whether a source of text is a file of token ids."""
    return source.endswith(".safetensors")


def stored_segments(
    source: str, key: str, length: int, limit: int | None
) -> Int64[Tensor, "segments length"]:
    """Return the first segments of a file.

    Args:
        source: A .safetensors file with the integers ``tokens`` ``[segments, length]``.
        key: Key of the configuration that names it.
        length: Tokens in a segment.
        limit: Number of segments; None: all.

    Raises:
        UserError: The file can't be read, holds something else, or has fewer or other segments.
    """
    path = Path(os.path.expanduser(source))  # noqa: PTH111  (Path's raises for an unknown ~user)
    try:
        with safe_open(path, "pt") as file:
            tokens: Tensor = file.get_tensor(TENSOR)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{key}: {source} can't be read ({error}): give a .safetensors file with the token ids of "
            f"segments, named {TENSOR}"
        ) from error
    if tokens.dim() != 2 or tokens.is_floating_point() or tokens.shape[1] != length:
        raise UserError(
            f"{key}: {source} has {tokens.dtype} {[*tokens.shape]}: expected integers [segments, {length}], "
            f"because segment_length is {length}"
        )
    if len(tokens) < (limit or 1):
        raise UserError(
            f"{key}: {source} has {len(tokens)} segments: set the number of segments to {len(tokens)} or less"
        )
    if int(tokens.min()) < 0:
        raise UserError(f"{key}: {source} has a token id below 0: ids begin at 0")
    return tokens[:limit].to(torch.int64)
