"""Convert weights that are stored as pickles (``pytorch_model.bin``) into safetensors, once.

A pickle can run code when it is read. Only ``weights_only`` is used, which makes tensors and refuses
everything else, so a file that can't be read that way is refused.
"""

import logging
import shutil
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aespa_pl.errors import UserError, first_line
from aespa_pl.measure import human
from aespa_pl.storage.cache import alone_in
from aespa_pl.storage.files import checksum, has_tensors, write_tensors

log = logging.getLogger(__name__)


def converted(path: Path, cache: Path) -> Path:
    """Return the safetensors file with a pickle's tensors, which is made if it isn't there yet.

    Making it takes as much disk in the cache as the pickle has, and host memory for its tensors. The
    file lies in ``weights`` in the cache, under the pickle's SHA-256; other processes wait until the first
    one has made it. UserError is raised where the pickle can't be read or holds more than tensors by name, or
    the cache can't be written to.
    """
    try:
        fingerprint = checksum(path)
    except OSError as error:
        raise UserError(
            f"model.pretrained: {path} cannot be read ({error.strerror or error}): correct its "
            "permissions, or copy it again from the model's origin"
        ) from error
    target = cache / "weights" / f"{path.stem}-{fingerprint[:16]}.safetensors"
    if has_tensors(target):
        return target
    try:
        with alone_in(target.parent):
            if not has_tensors(target):
                log.warning("%s is turned into safetensors, once: %s", path, target)
                needed, free = path.stat().st_size, shutil.disk_usage(target.parent).free
                if free < needed:
                    raise UserError(
                        f"data.cache: {target.parent} has {human(free, 'B')} free, but the weights of {path} "
                        f"as safetensors take {human(needed, 'B')}: free space there, or name another folder"
                    )
                write_tensors(target, _unpickled(path), {"format": "pt"})
    except OSError as error:
        raise UserError(
            f"data.cache: cannot write to {target.parent} ({error.strerror or error}), where the "
            f"weights of {path} are kept as safetensors: name another folder"
        ) from error
    return target


def _unpickled(path: Path) -> dict[str, Tensor]:
    """Read a pickle, and give tensors that share memory (tied ones) memory of their own."""
    try:
        # Pickles of torch before 1.6 are no zip archives, and can't be mapped into memory.
        content: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # damaged files raise almost any kind
        reason = first_line(error)
        raise UserError(
            f"model.pretrained: {path} is damaged, or a pickle of more than weights, which could "
            f"run code and is not read ({reason}): copy it again from the model's origin, or give a "
            "folder with safetensors"
        ) from error
    if not isinstance(content, dict) or not all(
        isinstance(name, str)
        and isinstance(value, Tensor)
        and value.layout == torch.strided
        and not value.is_quantized
        for name, value in content.items()
    ):
        raise UserError(
            f"model.pretrained: {path} holds something else than dense tensors by name: give a "
            "folder with safetensors"
        )
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in content.items():
        memory = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return tensors
