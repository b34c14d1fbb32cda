"""Choose the block type of every projection, where ``quantization.format`` is not uniform."""

from collections import Counter
from dataclasses import replace

from transformers import PreTrainedConfig

from aespa_pl.algorithm.grid_types import TYPES
from aespa_pl.commands.keys import nearest
from aespa_pl.errors import UserError
from aespa_pl.models import family_of
from aespa_pl.models.family import PER_LAYER_EMBEDDING, BlockLayout
from aespa_pl.models.llama_cpp import OTHER_ORDER, architecture_of, other_heads
from aespa_pl.models.llama_cpp_limits import unsupported_part
from aespa_pl.models.llama_cpp_types import MIXTURES, NARROW, Matrix, MixtureModel, matrix_of, mixture_type
from aespa_pl.planning.shape import Shape
from aespa_pl.settings import QuantizationSettings
from aespa_pl.settings.quantization import KEPT, names_projection
from aespa_pl.sizing.choose import Target
from aespa_pl.sizing.matrices import ENDS

UNIFORM, AUTO = "uniform", "auto"
BEFORE_CHOICE = "Q4_K"  # stands for the types that quantization.target chooses, until it has
TABLES = (*ENDS, PER_LAYER_EMBEDDING)
LM_HEAD = "lm_head"  # in quantization.bits_of, as transformers has it


def check_format(settings: QuantizationSettings) -> None:
    """Raise UserError where a format or a type is unknown, or types are set for a uniform format."""
    known = (UNIFORM, AUTO, *dict.fromkeys((*MIXTURES, *TYPES)))
    if settings.format not in known:
        raise UserError(f"quantization.format is {settings.format}: expected one of {', '.join(known)}")
    for key, kind in settings.types.items():
        if kind not in TYPES:
            raise UserError(f"quantization.types has {key}: {kind}: expected one of {', '.join(TYPES)}")
    if settings.target is not None:
        Target.of(settings.target)  # refuses what is no size
        if settings.format not in (UNIFORM, AUTO):
            raise UserError(
                f"quantization.format is {settings.format} and quantization.target is {settings.target}, "
                "which chooses the types itself: set quantization.format auto, or uniform for bits_of"
            )
    elif settings.format == AUTO:
        raise UserError(
            "quantization.format is auto, which chooses types for a size: set quantization.target, such as "
            "'3.5 GB' or 2.75 (bits a weight)"
        )
    if settings.format != UNIFORM and settings.bits_of:
        raise UserError(
            f"quantization.bits_of has {', '.join(settings.bits_of)} and quantization.format is "
            f"{settings.format}, where types have the bits: choose quantization.types, such as "
            f"'{{{next(iter(settings.bits_of))}: Q8_0}}', or quantization.format uniform"
        )
    others = [key for key in settings.types if key not in TABLES]
    if settings.format == UNIFORM and others:
        hint = nearest(others[0], TABLES) or ": choose a format of GGUF, or quantization.bits_of"
        raise UserError(
            f"quantization.types has {', '.join(others)} and quantization.format is uniform{hint}"
        )


def with_head(settings: QuantizationSettings, config: PreTrainedConfig) -> QuantizationSettings:
    """Return settings with the head's bits, ``lm_head`` in ``bits_of``, as a block type in ``types``.

    Raises UserError where no type has so many bits.
    """
    bits_of = dict(settings.bits_of)
    bits = bits_of.pop(LM_HEAD, KEPT)
    if settings.format != UNIFORM or bits == KEPT:
        return replace(settings, bits_of=bits_of)
    columns = Shape.of(config, family_of(config).layouts(config)).hidden
    # of several types with so many bits, a K type, or else the one with minimums
    fitting = {TYPES[kind].bits: kind for kind in sorted(TYPES) if TYPES[kind].fits(columns)}
    if config.tie_word_embeddings:
        raise UserError(
            f"quantization.bits_of has {LM_HEAD}, which is the embedding in this model: give it a block "
            f"type, such as quantization.types '{{embedding: {fitting.get(bits, 'Q8_0')}}}'"
        )
    if bits not in fitting:
        raise UserError(
            f"quantization.bits_of has {LM_HEAD}: {bits}, and no block type for rows of {columns} weights "
            f"has so many bits: expected {', '.join(map(str, [*sorted(fitting), KEPT]))}"
        )
    return replace(settings, bits_of=bits_of, types={**settings.types, "head": fitting[bits]})


def block_types(settings: QuantizationSettings, config: PreTrainedConfig) -> dict[str, str]:
    """Return block types by ``BLOCK.PROJECTION``, ``embedding``, ``head`` and ``per_layer_embedding``.

    Where grids are uniform, only the last three can have types. Raises UserError where llama.cpp doesn't
    run the model, or a type doesn't hold a row.
    """
    check_format(settings)
    family = family_of(config)
    shape = Shape.of(config, family.layouts(config))
    columns = dict.fromkeys(ENDS, shape.hidden) | {name: size for name, (_, size) in shape.tables.items()}
    types: dict[str, str] = {}
    if settings.format != UNIFORM:
        types = _mixture(settings.format, config, shape)
        of_blocks = enumerate(shape.of_blocks)
        columns |= {f"{i}.{name}": m.columns for i, block in of_blocks for name, m in block.items()}
    tied = bool(config.tie_word_embeddings)
    for key, kind in settings.types.items():
        named = [name for name in columns if is_named(key, name)]
        if not named or (key == "head" and tied):
            expected = ", ".join(n for n in columns if "." not in n and not (n == "head" and tied))
            raise UserError(
                f"quantization.types has {key}, which "
                + ("is the embedding in this model" if named else "names nothing in this model")
                + f": expected {expected}"
                + ("" if settings.format == UNIFORM else f" or BLOCK.PROJECTION, such as {next(iter(types))}")
            )
        types |= dict.fromkeys(named, kind)
    types |= {key: kind for key, kind in settings.types.items() if key in columns}
    for key, kind in types.items():
        if not TYPES[kind].fits(columns[key]):
            other = f"leave {key} out" if settings.format == UNIFORM else "quantization.format uniform"
            raise UserError(
                f"quantization.format is {settings.format}, but {key} has rows of {columns[key]} weights, "
                f"and {kind} holds multiples of {TYPES[kind].block}: set quantization.types "
                f"'{{{key}: {NARROW.get(kind, 'Q8_0')}}}' or {other}"
            )
    if settings.format != UNIFORM:
        _refuse_several_of_experts(types, family.layouts(config))
    return types


def _refuse_several_of_experts(types: dict[str, str], layouts: tuple[BlockLayout, ...]) -> None:
    """Refuse several types of the experts of a block, which are one tensor in a file of llama.cpp."""
    first: dict[str, str] = {}
    for block, layout in enumerate(layouts):
        for p in layout.projections:
            if layout.mixture is not None and p.module.startswith(f"{layout.mixture.experts}."):
                key, layer = f"{block}.{p.name}", p.module.rpartition(".")[2]
                before = first.setdefault(f"{block}.{layer}", key)
                if types[key] != types[before]:
                    raise UserError(
                        f"quantization.types makes {before} {types[before]} and {key} {types[key]}, but "
                        f"llama.cpp has {layer} of all experts in one tensor: give all the same type"
                    )


def _mixture(name: str, config: PreTrainedConfig, shape: Shape) -> dict[str, str]:
    """Return the types that a format gives the matrices of a model."""
    unsupported = unsupported_part(config) or (OTHER_ORDER if other_heads(config) else None)
    if unsupported is not None:
        raise UserError(f"quantization.format is {name}, but {unsupported}: set quantization.format uniform")
    layouts = family_of(config).layouts(config)
    model = MixtureModel.of(layouts, architecture_of(config).name)
    tied = bool(config.tie_word_embeddings)
    name = BEFORE_CHOICE if name == AUTO else name
    types = {}
    for block, layout in enumerate(layouts):
        for p in layout.projections:
            columns = shape.of_blocks[block][p.name].columns
            types[f"{block}.{p.name}"] = mixture_type(name, matrix_of(layout, p), columns, model, block)
    types["embedding"] = mixture_type(name, Matrix.EMBEDDING, shape.hidden, model, tied=tied)
    for table, (_, columns) in shape.tables.items():
        types[table] = mixture_type(name, Matrix.EMBEDDING, columns, model, tied=tied)
    if not tied:
        types["head"] = mixture_type(name, Matrix.HEAD, shape.hidden, model)
    return types


def is_named(key: str, name: str) -> bool:
    """Return whether a key of ``quantization.types`` names a matrix."""
    block, _, projection = name.partition(".")
    return names_projection(key, int(block), projection) if projection else key == name


def types_in_words(settings: QuantizationSettings) -> str:
    """Return the types of all matrices in words, with their number; of embedding and head alone each."""
    if settings.format == UNIFORM:
        return ", ".join(f"{key}: {kind}" for key, kind in settings.types.items())
    counts = sorted(Counter(settings.types.values()).items())
    types = ", ".join(f"{kind} for {n} {'matrix' if n == 1 else 'matrices'}" for kind, n in counts)
    name = "of llama.cpp" if settings.format == AUTO else f"{settings.format} of llama.cpp"
    return f"Format {name} ({types}), instead of bits, group_size and symmetric."
