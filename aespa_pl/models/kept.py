"""Mark the projections of a block that keep their weights."""

from dataclasses import replace

from transformers import PreTrainedConfig

from aespa_pl.models.family import BlockLayout, Family, FoldIntoRows, InputGroup
from aespa_pl.settings import QuantizationSettings


def layout_of(
    family: Family, config: PreTrainedConfig, settings: QuantizationSettings, index: int
) -> BlockLayout:
    """Return the layout of a block, given its number, in which projections that keep their weights say so.

    Those have 16 in ``quantization.bits_of``. They stay in the layout, because others are understood by them
    (a query by its key, an output by its value). No zeta is folded into what they read or write, so that
    their weights are those of the file.
    """
    layout = family.layout(config, index)
    kept = {p.name for p in layout.projections if settings.keeps(index, p.name)}
    return replace(layout, groups=tuple(_marked(group, kept) for group in layout.groups)) if kept else layout


def layouts_of(
    family: Family, config: PreTrainedConfig, settings: QuantizationSettings
) -> tuple[BlockLayout, ...]:
    """Return the layout of every block."""
    return tuple(layout_of(family, config, settings, i) for i in range(int(config.num_hidden_layers)))


def _marked(group: InputGroup, kept: set[str]) -> InputGroup:
    projections = tuple(replace(p, kept=p.name in kept) for p in group.projections)
    into = group.fold.projection if isinstance(group.fold, FoldIntoRows) else None
    touched = into in kept or any(p.kept for p in projections)
    return replace(group, projections=projections, fold=None if touched else group.fold)
