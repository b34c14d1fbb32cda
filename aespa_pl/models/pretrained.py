"""Read a model's weights from its files, block by block, without ever holding the model.

``PretrainedFolder.open`` finds every mistake in a folder before any tensor is read, except for values
that are not finite.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from aespa_pl.errors import UserError
from aespa_pl.models import family_of
from aespa_pl.models.family import Family
from aespa_pl.models.headers import (
    DTYPES,
    StoredTensor,
    locate,
    opened,
    read_config,
    read_header,
    refuse_no_tokenizer,
    shards,
    skeleton,
)
from aespa_pl.models.multimodal import parts_of, states_head, text_files, text_name, text_names, whole_type
from aespa_pl.models.pickles import converted
from aespa_pl.models.tied import shared
from aespa_pl.storage.cache import cache_folder


@dataclass(frozen=True)
class PretrainedFolder:
    """Knows the configuration and the tensors of a folder whose files are all there.

    Of a multimodal model it knows the text model alone.
    """

    folder: Path
    config: PreTrainedConfig
    tensors: Mapping[str, StoredTensor]
    """Tensors by their names in the model's ``state_dict``, in its order; tied names share a tensor."""
    extra: tuple[str, ...] = ()
    """Names in the files that the model has no place for."""
    whole: str | None = None
    """The ``model_type`` of the multimodal model that the files hold; None: they hold this one."""

    @classmethod
    def open(cls, folder: Path, cache: Path | None = None) -> "PretrainedFolder":
        """Check a folder and read its configuration; safetensors that are made from pickles lie in ``cache``.

        UserError is raised where a file or tensor is missing or damaged, or no family takes the model.
        """
        config = read_config(folder)
        refuse_no_tokenizer(folder)
        stored = dict[str, StoredTensor]()
        for shard in shards(folder):
            path = converted(shard, cache or cache_folder()) if shard.suffix == ".bin" else shard
            stored |= read_header(path)  # of a tensor in two files the last counts, as in transformers
        if (whole := whole_type(folder)) is not None:
            stored = text_names(stored)
            if "lm_head.weight" not in stored and not states_head(folder):
                config.tie_word_embeddings = True
        model = skeleton(config)
        located = locate(model, stored, folder)
        used, tensors = {tensor.name for tensor in located.values()}, shared(model, located)
        ends = {id(end.weight) for end in (model.get_input_embeddings(), model.get_output_embeddings())}
        names = [name for name, value in model.state_dict(keep_vars=True).items() if id(value) in ends]
        if len({tensors[name] for name in names}) > len(ends):
            # of a head in the files that is not the embedding transformers makes the model's head
            config.tie_word_embeddings = False
        ignores = family_of(config).ignores
        ignored = {tensor.name for name, tensor in stored.items() if ignores(config, name)}
        extra = tuple(sorted({tensor.name for tensor in stored.values()} - used - ignored))
        return cls(folder, config, tensors, extra, whole)

    @cached_property
    def family(self) -> Family:
        """Return the adapter of the model's family."""
        return family_of(self.config)

    @property
    def own_files(self) -> dict[str, dict[str, Any]]:
        """Return the content of files that a text model has in the place of its whole's, by name."""
        return {} if self.whole is None else text_files(self.config, self.tokenizer(), self.folder)

    @property
    def dtype(self) -> torch.dtype:
        """Return the type in which the first matrix of the blocks is stored; a few models mix types."""
        path = self.family.blocks_path
        matrices = (t for name, t in self.tensors.items() if name.startswith(path) and len(t.shape) > 1)
        return DTYPES[next(matrices).dtype]

    @property
    def files(self) -> set[Path]:
        """Return the files that tell one model from another: config.json, and those with weights."""
        return {self.folder / "config.json", *(tensor.file for tensor in self.tensors.values())}

    def bytes_beside(self, weights: int, names: Collection[str] = ()) -> int:
        """Return the bytes of all tensors, tied ones once, but the matrices of blocks and those of ``names``.

        The matrices have so many ``weights``. Files may be larger: some hold a tied head twice.
        """
        others = set(self.tensors.values()) - {self.tensors[name] for name in names}
        return sum(stored.bytes for stored in others) - weights * self.dtype.itemsize

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer; raise UserError where its files are damaged."""
        try:
            tokenizer = AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False)
        except Exception as error:  # what it raises depends on the tokenizer's class
            raise UserError(
                f"model.pretrained: the tokenizer in {self.folder} cannot be read ({error}): "
                "copy it from the model's origin"
            ) from error
        return cast(PreTrainedTokenizerBase, tokenizer)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor of the model's ``state_dict``, on the CPU, by default in its stored type.

        UserError is raised where values are not finite, or beyond the range of ``dtype``.
        """
        return self._read([name], torch.device("cpu"), dtype or DTYPES[self.tensors[name].dtype])[name]

    def run_type(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the type that a tensor has in a model that runs in ``dtype``."""
        return torch.promote_types(dtype, torch.float32) if name.endswith(self.family.exact) else dtype

    def unused(self) -> str | None:
        """Say which tensors in the files the model has no place for; None if there are none."""
        if not self.extra:
            return None
        names, blocks = self.extra, self.config.num_hidden_layers
        if self.whole is not None:  # other parts have blocks as well
            names = tuple(text_name(name) for name in names if text_name(name) != name)
        block = re.compile(rf"(?:^|\.){self.family.blocks_path.rpartition('.')[2]}\.(\d+)\.")
        stored = 1 + max((int(match[1]) for name in names if (match := block.search(name))), default=-1)
        if stored > blocks:
            return (
                f"config.json has {blocks} blocks, the files in {self.folder} have {stored}: the "
                "others are left out"
            )
        if self.whole is not None:
            return f"the text model of {self.folder} is quantized, without {parts_of(self.extra)}"
        shown = ", ".join(self.extra[:3]) + (" ..." if len(self.extra) > 3 else "")
        return (
            f"tensors in {self.folder} that the model has no place for are left out: "
            f"{len(self.extra)} ({shown})"
        )

    def stem_names(self) -> tuple[str, ...]:
        """Return the names of what lies outside the blocks; of tied names, the first only."""
        names: dict[StoredTensor, str] = {}
        for name, stored in self.tensors.items():
            if not name.startswith(f"{self.family.blocks_path}."):
                names.setdefault(stored, name)
        return tuple(names.values())

    def block_names(self, index: int) -> tuple[str, ...]:
        """Return the names of a block's tensors, as in the model's ``state_dict``."""
        prefix = self.family.block_prefix(index)
        return tuple(name for name in self.tensors if name.startswith(prefix))

    def with_block(self, index: int, file: Path) -> "PretrainedFolder":
        """Return the folder with the tensors of a block in another file."""
        stored = read_header(file)
        places = {name: self.family.places(name)[0] for name in self.block_names(index)}
        moved = {name: stored[place].taken(part) for name, (place, part) in places.items()}
        return replace(self, tensors={**self.tensors, **moved})

    def with_stem(self, file: Path) -> "PretrainedFolder":
        """Return the folder with what lies outside the blocks in another file."""
        names, stored = {self.tensors[name]: name for name in self.stem_names()}, read_header(file)
        moved = {name: stored[names[old]] for name, old in self.tensors.items() if old in names}
        return replace(self, tensors={**self.tensors, **moved})

    def embeddings(self) -> dict[str, str]:
        """Return the names of the weights of ``embedding`` and ``head``, and of others that are tables.

        A tied head is the embedding.
        """
        model = self.skeleton()
        ends = {"embedding": model.get_input_embeddings(), "head": model.get_output_embeddings()}
        names: dict[str, str] = {}
        for part, module in ends.items():
            state = model.state_dict(keep_vars=True)
            name = next(n for n, value in state.items() if value is getattr(module, "weight", None))
            if name not in names.values():
                names[part] = name
        others = self.family.other_embeddings(self.config)
        return names | dict(zip(others, self.tables, strict=True))

    def skeleton(self) -> PreTrainedModel:
        """Return the model without weights: all on the meta device, in evaluation mode."""
        return skeleton(self.config)

    @property
    def tables(self) -> tuple[str, ...]:
        """Return the names of the embeddings beside that of the hidden states."""
        return tuple(f"{path}.weight" for path in self.family.other_embeddings(self.config).values())

    def mapped(self, name: str) -> Tensor:
        """Return a tensor, not to be changed, in its stored type; only what is read of it takes memory."""
        with opened(self.tensors[name].file) as file:
            return self.tensors[name].read(file)

    def load_stem(
        self, model: PreTrainedModel, device: torch.device, dtype: torch.dtype, *, whole: bool = False
    ) -> None:
        """Load all weights outside the blocks into a skeleton; raise UserError where one is not finite.

        The family reads the rows of its tokens from ``tables`` on disk, unless all shall be loaded ``whole``.
        """
        mapped = () if whole else self.tables
        read = self._read([name for name in self.stem_names() if name not in mapped], device, dtype)
        _assign(model, read | {name: self.mapped(name) for name in mapped})
        self.family.restore_buffers(model, device)

    def release_stem(self, model: PreTrainedModel) -> None:
        """Put everything outside the blocks back on the meta device, but for buffers."""
        dtype = model.get_output_embeddings().weight.dtype
        shapes = {name: self.tensors[name].shape for name in self.stem_names()}
        _assign(
            model, {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
        )

    def load_block(
        self,
        model: PreTrainedModel,
        index: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        unread: Collection[str] = (),
    ) -> nn.Module:
        """Load the weights of one block into a skeleton, and return the block.

        The tensors of ``unread``, named as in the block, get memory and no values. Raises UserError where a
        tensor has NaN or infinite values.
        """
        prefix = self.family.block_prefix(index)
        block = cast(nn.Module, model.get_submodule(prefix.removesuffix(".")))
        names = [n for n in self.block_names(index) if n.removeprefix(prefix) not in unread]
        read = self._read(names, device, dtype, exact=True)
        tensors = {name.removeprefix(prefix): tensor for name, tensor in read.items()}
        for name in unread:
            tensors[name] = torch.empty(block.get_parameter(name).shape, device=device, dtype=dtype)
        block.load_state_dict(tensors, assign=True)
        return block

    def release_block(self, model: PreTrainedModel, index: int) -> None:
        """Put a block back on the meta device; its memory is free unless others refer to it."""
        block = model.get_submodule(self.family.block_prefix(index).removesuffix("."))
        empty = {name: torch.empty_like(tensor, device="meta") for name, tensor in block.state_dict().items()}
        block.load_state_dict(empty, assign=True)

    def _read(
        self, names: Sequence[str], device: torch.device, dtype: torch.dtype, *, exact: bool = False
    ) -> dict[str, Tensor]:
        """Return tensors in a type; ``exact``: or in that of a model which runs in it."""
        tensors = {}
        for path in dict.fromkeys(self.tensors[name].file for name in names):
            with opened(path) as file:
                for name in (name for name in names if self.tensors[name].file == path):
                    raw = self.tensors[name].read(file)
                    # The copy frees us of the file: raw is a view of its memory map.
                    own = self.run_type(name, dtype) if exact else dtype
                    tensors[name] = raw.to(device, own, copy=True)
                    refuse_unusable(name, path, raw, tensors[name])
        return {name: tensors[name] for name in names}


def _assign(model: PreTrainedModel, tensors: dict[str, Tensor]) -> None:
    """Put tensors outside the blocks into a model; a tied head stays tied."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head.weight is embedding.weight
    model.load_state_dict(tensors, assign=True, strict=False)
    if tied:
        head.weight = embedding.weight


def refuse_unusable(name: str, path: Path, raw: Tensor, converted: Tensor) -> None:
    """Raise UserError where a tensor of a file is not finite, by itself or in the type it is converted to."""
    if bool(converted.isfinite().all()):
        return
    if bool(raw.isfinite().all()):
        raise UserError(
            f"model.dtype: tensor {name} in {path} has values beyond the range of "
            f"{converted.dtype}: set model.dtype to float32 or bfloat16"
        )
    raise UserError(
        f"model.pretrained: tensor {name} in {path} has NaN or infinite values: copy the file again "
        "from the model's origin"
    )
