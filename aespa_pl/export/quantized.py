"""Hold a finished run as a value: the integers of each block, and everything else of the model.

Notation: rows are output channels, d_in input channels, G groups of d_in / G columns that share a scale.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aespa_pl.algorithm.grid_types import TENSORS, TYPES, TypedWeight
from aespa_pl.algorithm.quantizer import QuantizedWeight, StoredWeight
from aespa_pl.errors import UserError
from aespa_pl.models import family_of
from aespa_pl.models.family import BlockLayout, Family, Projection, layout_of
from aespa_pl.models.headers import DTYPES, opened
from aespa_pl.models.hub import resolve
from aespa_pl.models.pretrained import PretrainedFolder
from aespa_pl.run.folder import how_to_continue
from aespa_pl.run.journal import Run, model_fingerprint
from aespa_pl.run.stored_settings import stored_settings
from aespa_pl.settings import Settings
from aespa_pl.storage.cache import cache_folder
from aespa_pl.tuning.weights import merged

UNIFORM = ("integers", "scale", "zero_point")
"""Tensors of a quantized matrix in a block file, where its grid is uniform."""


@dataclass(frozen=True)
class StoredBlock:
    """Holds one Transformer block of a run, by the names in the model's ``state_dict``."""

    matrices: Mapping[str, StoredWeight]
    """Quantized matrices by the name of the weight."""
    others: Mapping[str, Tensor]
    """Norms and biases, with zeta folded in."""


@dataclass(frozen=True)
class QuantizedModel:
    """Reads a finished run that was checked; one block at a time is in memory."""

    run: Run
    settings: Settings
    original: Path
    """Folder of the model that was quantized."""
    cache: Path
    """Folder of tokens and of weights out of pickles."""
    pretrained: PretrainedFolder
    """Folder of the dequantized model that the run left."""
    parts: Mapping[str, str]
    """Names of the weights of ``embedding`` and ``head``; a tied head is the embedding."""

    @classmethod
    def open(
        cls, folder: Path, original: str | None = None, *, trusts_places: bool = True
    ) -> "QuantizedModel":
        """Check a run's folder.

        The original model lies where config.yaml says, unless ``original`` is given; ``data.cache`` of a run
        that is not trusted isn't used. Raises UserError where the run is not finished, one of its files is
        damaged or missing, or the original can't be found or is another model.
        """
        run = Run.open(folder)
        settings = stored_settings(run.folder, run.fingerprint)
        if not run.model:
            raise UserError(f"the run {folder} is not finished: continue it with {how_to_continue(folder)}")
        run.refuse_damaged()
        pretrained = PretrainedFolder.open(run.model_folder)
        place = cache_folder(settings.data.cache if trusts_places else None)
        source = resolve(original or settings.model.pretrained, settings.model.revision)
        stored = PretrainedFolder.open(source, place).tensors.values()
        weights = {tensor.file for tensor in stored}
        if model_fingerprint({source / "config.json", *weights}) != run.fingerprint["model"]:
            raise UserError(
                f"--original: the run {folder} was made from another model than {source}: give the "
                "folder of the model that was quantized"
            )
        return cls(run, settings, source, place, pretrained, pretrained.embeddings())

    @property
    def bits(self) -> int:
        """Return the largest number of bits that an integer has."""
        return max(self.matrix_bits)

    @property
    def matrix_bits(self) -> tuple[int, ...]:
        """Return the numbers of bits that matrices have, from the least to the most; one for most runs."""
        return tuple(sorted(set(map(self.bits_of, self.matrices))))

    def bits_of(self, name: str) -> int:
        """Return the bits of the integers of a quantized weight, given its name."""
        index, projections = self.matrices[name]
        return self.settings.quantization.bits_for(index, projections[0].name)

    @property
    def embeddings(self) -> frozenset[str]:
        """Return the names of the input and output embeddings; of tied ones, the first."""
        return frozenset(self.parts.values())

    def type_of(self, name: str) -> str | None:
        """Return the block type of a quantized weight, given its name; None where its grid is uniform."""
        index, projections = self.matrices[name]
        return self.settings.quantization.type_for(index, projections[0].name)

    @property
    def symmetric(self) -> bool:
        """Tell whether every zero point is the middle of the range."""
        return self.settings.quantization.symmetric

    @property
    def group_size(self) -> int | None:
        """Return the number of columns that share a scale; None: all of a row."""
        return self.settings.quantization.group_size

    @property
    def granularity(self) -> str:
        """Return bits and groups in words, for messages."""
        if self.settings.quantization.format != "uniform":
            name = self.settings.quantization.format
            return "types of llama.cpp" if name == "auto" else f"{name} of llama.cpp"
        groups = f"groups of {self.group_size}" if self.group_size else "per channel"
        kind = "symmetric" if self.symmetric else "asymmetric"
        bits = " and ".join(map(str, self.matrix_bits))
        return f"{bits} bits, {groups}, {kind}"

    @property
    def family(self) -> Family:
        """Return the model's family."""
        return family_of(self.pretrained.config)

    def layout(self, index: int = 0) -> BlockLayout:
        """Return the layout of a block."""
        return layout_of(self.family, self.pretrained.config, self.settings.quantization, index)

    @property
    def block_count(self) -> int:
        """Return the number of Transformer blocks."""
        return int(self.pretrained.config.num_hidden_layers)

    @cached_property
    def matrices(self) -> Mapping[str, tuple[int, tuple[Projection, ...]]]:
        """Return, by the name of each quantized weight, its block and the projections in its rows."""
        return {name: found for name, found in self._projections.items() if not found[1][0].kept}

    @cached_property
    def _projections(self) -> Mapping[str, tuple[int, tuple[Projection, ...]]]:
        found: dict[str, tuple[int, tuple[Projection, ...]]] = {}
        for index in range(self.block_count):
            for projection in (p for group in self.layout(index).groups for p in group.projections):
                name = f"{self.family.block_prefix(index)}{projection.module}.weight"
                _, before = found.get(name, (index, ()))
                found[name] = index, (*before, projection)
        return found

    def projections_of(self, name: str) -> tuple[Projection, ...]:
        """Return the projections that a weight or bias belongs to, kept ones as well; none elsewhere."""
        _, projections = self._projections.get(f"{name.rpartition('.')[0]}.weight", (0, ()))
        return projections

    def stem_names(self) -> tuple[str, ...]:
        """Return the names of what lies outside the blocks; of tied names, the first only."""
        return self.pretrained.stem_names(self.family)

    def block_names(self, index: int) -> tuple[str, ...]:
        """Return the names of a block's tensors."""
        return self.pretrained.block_names(self.family, index)

    def unquantized_linears(self) -> list[str]:
        """Return the names of the linear layers that keep their weights, such as the head and routers."""
        linears = [
            name
            for name, module in self.pretrained.skeleton().named_modules()
            if isinstance(module, nn.Linear) and f"{name}.weight" not in self.matrices
        ]
        # the library's are no linear layers, but other engines' are
        routers = [
            self.family.places(self.family.block_prefix(index) + mixture.router)[0][0]
            for index in range(self.block_count)
            if (mixture := self.layout(index).mixture) is not None
        ]
        return linears + routers

    @property
    def has_experts(self) -> bool:
        """Return whether blocks have mixtures of experts."""
        return any(self.layout(i).mixture is not None for i in range(self.block_count))

    def stem_type(self, name: str) -> str | None:
        """Return the block type that a run with a format of llama.cpp gave embedding or head; else None."""
        parts = {name: part for part, name in self.parts.items()}
        return self.settings.quantization.types.get(parts.get(name, ""))

    def stem(self, name: str) -> Tensor | TypedWeight:
        """Return a tensor that lies outside the blocks as stored: in a block type or as it was."""
        kind = self.stem_type(name)
        if kind is None:
            return self.pretrained.tensor(name)
        with opened(self.run.stem_file) as file:
            keys = [key for key in file.keys() if key.startswith(f"{name}.")]  # noqa: SIM118 - no mapping
            return TypedWeight.read({key: file.get_tensor(key) for key in keys}, name, TYPES[kind])

    def stem_value(self, name: str) -> Tensor:
        """Return a tensor that lies outside the blocks: dequantized, or as stored."""
        stored = self.stem(name)
        return stored if isinstance(stored, Tensor) else stored.weight()

    def block(self, index: int) -> StoredBlock:
        """Read one block."""
        names = self.block_names(index)
        with opened(self.run.block_file(index)) as file:
            matrices = {name: self._matrix(file, name) for name in names if name in self.matrices}
        others = {name: self.pretrained.tensor(name) for name in names if name not in matrices}
        return StoredBlock(matrices, others)

    def _matrix(self, file: Any, name: str) -> StoredWeight:
        """Read the weight of a linear layer, whose rows may belong to several projections in turn.

        Raises UserError where an integer has more bits than the run says.
        """
        index, projections = self.matrices[name]
        kind, stored, layout = self.type_of(name), set(file.keys()), self.layout(index)
        tensors = {
            key: merged(
                {p.name: file.get_tensor(f"{p.name}.{key}") for p in projections},
                layout,
                projections[0].module,
            )
            for key in (UNIFORM if kind is None else TENSORS)
            if f"{projections[0].name}.{key}" in stored
        }
        if kind is not None:
            return TypedWeight(**tensors, kind=TYPES[kind])
        try:
            return QuantizedWeight(**tensors, bits=self.bits_of(name))
        except ValueError as error:
            raise UserError(
                f"the run {self.run.folder}: {name}: {error}: quantize the model again"
            ) from error

    def dtype(self, name: str) -> torch.dtype:
        """Return the type that the original stores a tensor in."""
        return DTYPES[self.pretrained.tensors[name].dtype]
