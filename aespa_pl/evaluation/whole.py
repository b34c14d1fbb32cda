"""Load a whole model, as an application would: tasks need it, and models whose weights are packed."""

from pathlib import Path
from typing import cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from aespa_pl.errors import UserError
from aespa_pl.measure import free_bytes, human
from aespa_pl.models.headers import skeleton


def unpacked_config(folder: Path) -> PreTrainedConfig:
    """Return the configuration of a model without that of its packing: the shapes are the original's."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def refuse_too_large(folder: Path, device: torch.device, dtype: torch.dtype) -> None:
    """Raise UserError if a model does not fit into the memory that is free; nothing is loaded."""
    parameters = skeleton(unpacked_config(folder)).parameters()
    needed = sum(parameter.numel() for parameter in parameters) * dtype.itemsize
    free = free_bytes(device)
    if needed > free:
        raise UserError(
            f"{folder} takes {human(needed, 'B')} in {str(dtype).removeprefix('torch.')}, but "
            f"{human(free, 'B')} are free on {device}, and tasks and packed models need the whole model in "
            "memory: choose another device, --model.dtype float16, or leave --tasks out (the perplexity of "
            "a run needs one block at a time)"
        )


def load_whole(folder: Path, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model of a folder, all of it in memory.

    Raises UserError where it does not fit into the memory that is free, or transformers can't load it.
    """
    refuse_too_large(folder, device, dtype)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # what it raises depends on the format
        raise UserError(
            f"model.pretrained: transformers cannot load {folder} ({error}): copy "
            "it again from its origin, or export the run again"
        ) from error
    return cast(PreTrainedModel, model.to(device).eval())
