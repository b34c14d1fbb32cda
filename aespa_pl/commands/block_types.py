"""Choose the block type of every projection, where ``quantization.format`` is not uniform."""

from transformers import PreTrainedConfig

from aespa_pl.algorithm.grid_types import TYPES
from aespa_pl.errors import UserError
from aespa_pl.models import family_of
from aespa_pl.models.llama_cpp import architecture_of, unsupported_part
from aespa_pl.models.llama_cpp_types import MIXTURES, Matrix, MixtureModel, matrix_of, mixture_type
from aespa_pl.planning.shape import Shape
from aespa_pl.settings import QuantizationSettings

UNIFORM = "uniform"


def check_format(settings: QuantizationSettings) -> None:
    """Refuse a format that there is none of.

    Raises UserError where a format or a type is unknown, or belongs to a uniform format and is set.
    """
    known = (UNIFORM, *dict.fromkeys((*MIXTURES, *TYPES)))
    if settings.format not in known:
        raise UserError(
            f"quantization.format is {settings.format}: expected one of {', '.join(known)}"
        )
    for key, kind in settings.types.items():
        if kind not in TYPES:
            raise UserError(
                f"quantization.types has {key}: {kind}: expected one of {', '.join(TYPES)}"
            )
    if settings.format == UNIFORM and settings.types:
        raise UserError(
            "quantization.types is set and quantization.format is uniform: choose a format of GGUF"
        )


def block_types(settings: QuantizationSettings, config: PreTrainedConfig) -> dict[str, str]:
    """Return block types by ``BLOCK.PROJECTION``, ``embedding`` and ``head``; empty where grids are uniform.

    Raises UserError where llama.cpp doesn't run the model, or no type holds a row.
    """
    check_format(settings)
    if settings.format == UNIFORM:
        return {}
    unsupported = unsupported_part(config)
    if unsupported is not None:
        raise UserError(
            f"quantization.format is {settings.format}, but {unsupported}: set quantization.format uniform"
        )
    family = family_of(config)
    layout, shape = family.layout(config), Shape.of(config, family)
    model = MixtureModel.of(config, layout, architecture_of(config).name)
    matrices = zip(layout.projections, shape.matrices, strict=True)
    columns = {p.name: matrix.columns for p, matrix in matrices}
    columns |= dict.fromkeys(("embedding", "head"), shape.hidden)
    tied = bool(config.tie_word_embeddings)
    ends = {
        "embedding": mixture_type(settings.format, Matrix.EMBEDDING, shape.hidden, model, tied=tied)
    }
    if not tied:
        ends["head"] = mixture_type(settings.format, Matrix.HEAD, shape.hidden, model)
    types = (
        {
            f"{block}.{p.name}": mixture_type(
                settings.format, matrix_of(layout, p), columns[p.name], model, block
            )
            for block in range(model.blocks)
            for p in layout.projections
        }
        | ends
        | settings.types
    )
    for key, kind in types.items():
        width = columns[key.partition(".")[2] or key]
        if not TYPES[kind].fits(width):
            raise UserError(
                f"quantization.format is {settings.format}, but {key} has rows of {width} weights, and "
                f"{kind} holds multiples of {TYPES[kind].block}: set quantization.format uniform"
            )
    return types


def types_in_words(settings: QuantizationSettings) -> str:
    """Return the types of all projections in words, with their number."""
    counts: dict[str, int] = {}
    for kind in settings.types.values():
        counts[kind] = counts.get(kind, 0) + 1
    types = ", ".join(
        f"{kind} for {count} {'matrix' if count == 1 else 'matrices'}"
        for kind, count in sorted(counts.items())
    )
    return f"Format {settings.format} of llama.cpp ({types}), instead of bits, group_size and symmetric."
