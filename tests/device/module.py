"""Torch knows the simulated device by a module."""

from functools import cache
from typing import Any

import torch
from torch.utils import backend_registration

from tests.device.tally import tally

NAME = "simulated"
DEVICE_MEMORY = 80 * 10**9


class Module:
    """What ``torch.get_device_module`` returns for the device: the part of torch.cuda that is needed."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def _is_in_bad_fork(self) -> bool:
        return False

    def synchronize(self, _device: Any = None) -> None:
        tally("synchronize")

    def mem_get_info(self, _device: Any = None) -> tuple[int, int]:
        return DEVICE_MEMORY, DEVICE_MEMORY

    def max_memory_allocated(self, _device: Any = None) -> int:
        return 0


@cache
def device() -> torch.device:
    """Return the device; torch knows it from then on, in the whole process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, Module())
    return torch.device(f"{NAME}:0")
