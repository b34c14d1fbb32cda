"""Hold a finished run as a value: the integers of each block, and everything else of the model.

Notation: rows are output channels, d_in input channels, G groups of d_in / G columns that share a scale.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from aespa_pl.algorithm.grid_types import TYPES, TypedWeight
from aespa_pl.algorithm.quantizer import StoredWeight, read_weight
from aespa_pl.errors import UserError
from aespa_pl.models.family import BlockLayout, Family, Projection
from aespa_pl.models.headers import DTYPES
from aespa_pl.models.hub import EMBEDDED, resolve
from aespa_pl.models.kept import layouts_of
from aespa_pl.models.pretrained import PretrainedFolder
from aespa_pl.paths import expanded
from aespa_pl.run.folder import how_to_continue
from aespa_pl.run.journal import Run
from aespa_pl.run.stored_settings import stored_settings
from aespa_pl.settings import QuantizationSettings, Settings
from aespa_pl.storage.cache import cache_folder
from aespa_pl.tuning.weights import merged_weight

StoredTensor = Tensor | StoredWeight
"""Tensor as a run stores it: quantized, or as it is."""


def _original(given: str | None, settings: Settings) -> Path:
    """Return the folder of the model that was quantized: the one that is given, or where the run found it."""
    if given is not None:
        if given.startswith(EMBEDDED) or expanded(given).is_dir():
            return resolve(given)
        raise UserError(f"--original: there is no folder {given}: give that of the model that was quantized")
    try:
        return resolve(settings.model.pretrained, settings.model.revision)
    except UserError as error:
        reason = str(error).removeprefix("model.pretrained: ").partition(": give ")[0]
        raise UserError(
            f"--original: the model that was quantized is not to be had ({reason}): give its folder"
        ) from error


def value_of(stored: StoredTensor) -> Tensor:
    """Return a tensor dequantized in float32, or as it is stored."""
    return stored if isinstance(stored, Tensor) else stored.weight()


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

        The original lies where config.yaml says, unless it is given; ``data.cache`` of a run that is not
        trusted isn't used. Raises UserError where the run is unfinished or damaged, or the original another.
        """
        run = Run.open(folder)
        settings = stored_settings(run.folder, run.fingerprint)
        if not run.model:
            raise UserError(f"the run {folder} is not finished: continue it with {how_to_continue(folder)}")
        run.refuse_damaged()
        pretrained = PretrainedFolder.open(run.model_folder)
        place = cache_folder(settings.data.cache if trusts_places else None)
        source = _original(original, settings)
        if not run.is_of(PretrainedFolder.open(source, place).files):
            raise UserError(
                f"--original: the run {folder} was made from another model than {source}: give the "
                "folder of the model that was quantized"
            )
        return cls(run, settings, source, place, pretrained, pretrained.embeddings())

    @property
    def quantization(self) -> QuantizationSettings:
        """Return how the run quantized."""
        return self.settings.quantization

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
        return self.quantization.bits_for(index, projections[0].name)

    def type_of(self, name: str) -> str | None:
        """Return the block type of a quantized weight, given its name; None where its grid is uniform."""
        index, projections = self.matrices[name]
        return self.quantization.type_for(index, projections[0].name)

    @property
    def granularity(self) -> str:
        """Return bits and groups in words, for messages."""
        name, size = self.quantization.format, self.quantization.group_size
        if name != "uniform":
            return "types of llama.cpp" if name == "auto" else f"{name} of llama.cpp"
        groups = f"groups of {size}" if size else "per channel"
        kind = "symmetric" if self.quantization.symmetric else "asymmetric"
        return f"{' and '.join(map(str, self.matrix_bits))} bits, {groups}, {kind}"

    @property
    def family(self) -> Family:
        """Return the model's family."""
        return self.pretrained.family

    @cached_property
    def layouts(self) -> tuple[BlockLayout, ...]:
        """Return the layout of every block; of experts they take long to make."""
        return layouts_of(self.family, self.pretrained.config, self.quantization)

    @property
    def block_count(self) -> int:
        """Return the number of Transformer blocks."""
        return int(self.pretrained.config.num_hidden_layers)

    @cached_property
    def matrices(self) -> Mapping[str, tuple[int, tuple[Projection, ...]]]:
        """Return, by the name of each quantized weight, its block and the projections in its rows."""
        return {name: found for name, found in self._projections.items() if not found[1][0].kept}

    @cached_property
    def found(self) -> dict[str, tuple[int, Collection[int]]]:
        """Return bits and zero points by matrix, as a format has found them, which asks often."""
        return {}

    @cached_property
    def _projections(self) -> Mapping[str, tuple[int, tuple[Projection, ...]]]:
        found: dict[str, tuple[int, tuple[Projection, ...]]] = {}
        for index, layout in enumerate(self.layouts):
            for projection in (p for group in layout.groups for p in group.projections):
                name = f"{self.family.block_prefix(index)}{projection.module}.weight"
                _, before = found.get(name, (index, ()))
                found[name] = index, (*before, projection)
        return found

    def projections_of(self, name: str) -> tuple[Projection, ...]:
        """Return the projections that a weight or bias belongs to, kept ones as well; none elsewhere."""
        _, projections = self._projections.get(f"{name.rpartition('.')[0]}.weight", (0, ()))
        return projections

    def names(self) -> dict[str, int | None]:
        """Return all names, first those outside the blocks, each with its block (None there)."""
        blocks = {name: i for i in range(self.block_count) for name in self.pretrained.block_names(i)}
        return {**dict.fromkeys(self.pretrained.stem_names()), **blocks}

    def unquantized_linears(self) -> list[str]:
        """Return the names of the linear layers that keep their weights, such as the head and routers."""
        modules = self.pretrained.skeleton().named_modules()
        linears = [name for name, module in modules if isinstance(module, nn.Linear)]
        mixtures = enumerate(layout.mixture for layout in self.layouts)
        paths = (
            self.family.block_prefix(i) + mixture.router for i, mixture in mixtures if mixture is not None
        )
        # the library's are no linear layers, but other engines' are
        routers = [self.family.places(path)[0][0] for path in paths]
        return [name for name in linears if f"{name}.weight" not in self.matrices] + routers

    @property
    def has_experts(self) -> bool:
        """Return whether blocks have mixtures of experts."""
        return any(layout.mixture is not None for layout in self.layouts)

    @property
    def keeps_experts(self) -> bool:
        """Return whether an expert has a projection that is not quantized."""
        found = (p for _, projections in self._projections.values() for p in projections)
        return any(p.kept and p.expert is not None for p in found)

    def stem_type(self, name: str) -> str | None:
        """Return the block type that a run with a format of llama.cpp gave embedding or head; else None."""
        parts = {name: part for part, name in self.parts.items()}
        return self.quantization.types.get(parts.get(name, ""))

    def stem(self, name: str) -> Tensor | TypedWeight:
        """Return a tensor that lies outside the blocks as stored: in a block type or as it was."""
        if (kind := self.stem_type(name)) is None:
            return self.pretrained.tensor(name)
        return TypedWeight.read(load_file(self.run.stem_file), name, TYPES[kind])

    def block(self, index: int) -> dict[str, StoredTensor]:
        """Read one block; its norms and biases have zeta folded in."""
        names = self.pretrained.block_names(index)
        others = {name: self.pretrained.tensor(name) for name in names if name not in self.matrices}
        tensors = load_file(self.run.block_file(index))
        return others | {name: self._matrix(tensors, name) for name in names if name in self.matrices}

    def _matrix(self, tensors: Mapping[str, Tensor], name: str) -> StoredWeight:
        """Return the weight of a linear layer, whose rows may belong to several projections in turn."""
        (index, projections), bits, kind = self.matrices[name], self.bits_of(name), self.type_of(name)
        try:
            parts = {p.name: read_weight(tensors, p.name, bits, kind) for p in projections}
        except ValueError as error:
            why = f"the run {self.run.folder}: {name}: {error}: quantize the model again"
            raise UserError(why) from error
        return merged_weight(parts, self.layouts[index], projections)

    def dtype(self, name: str) -> torch.dtype:
        """Return the type that the original stores a tensor in."""
        return DTYPES[self.pretrained.tensors[name].dtype]
