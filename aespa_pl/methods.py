"""List the methods of quantization; ``METHODS`` has them by name.

What a method decides can be set to something else with the setting of that meaning;
:func:`aespa_pl.resolve.resolved` brings both together. docs/methods.md has the paper of each.
"""

from dataclasses import dataclass, replace
from typing import Literal

Objective = Literal["attention", "layer"]
Learned = Literal["none", "attention", "all"]
Parametrization = Literal["straight-through", "annealed", "rounding", "clipping", "affine"]
Unit = Literal["block", "sublayer"]


@dataclass(frozen=True)
class Method:
    """Describes a method by its choice of steps; the defaults are nearest rounding, which takes no step.

    Each field is the value of the setting of the same meaning where the user leaves that at null.
    """

    name: str
    """Value of quantization.method."""
    search: bool = False
    """Step 2: search the clip of each grid for the least loss; off: the smallest to the largest weight."""
    zfold: bool = False
    """Step 2: fit the column factor zeta as well."""
    awq: bool = False
    """Step 2: derive the column factor from the mean absolute inputs."""
    optq: bool = False
    """Step 3: compensate each column's rounding error in the columns not yet visited."""
    optq_rows: bool = False
    """Step 3: compensate in later rows of the same head as well, where the objective couples rows."""
    query_key: Objective = "layer"
    """Objective of the query and key projections."""
    value: Objective = "layer"
    """Objective of the value projection."""
    learn: Learned = "none"
    """Step 4: projections that learn their rounding."""
    keep_best: bool = False
    """Step 4: keep the earlier integers of a row where the learned ones are worse."""
    polish: bool = False
    """Coordinate descent on the integers at the end."""
    input_correction: float = 0.0
    """Share of the error of earlier blocks that the weights make up for."""
    tune_blocks: bool = False
    """Train each block by forward passes at its end."""
    tune_model: bool = False
    """Train the model end to end after the last block."""
    parametrization: Parametrization = "straight-through"
    """What the tuning of blocks learns of a weight."""
    unit: Unit = "block"
    """What the tuning of blocks trains together."""
    epochs: int = 2
    """Visits of all calibration segments in the tuning of blocks."""


# nearest rounding on min-max grids takes no step at all
_RTN = Method(name="rtn")
# columns are rounded in turn, and the later ones make up for the error; grids are searched with the Hessian,
# as in the aespa paper's comparison (the OPTQ paper's min-max grids: quantization.grid.search false)
_OPTQ = Method(name="optq", search=True, optq=True)
# grids with a column factor that is folded away, then OPTQ's integers; with quantization.objective.value
# attention the value projection takes its attention-wise Hessian
_ZFOLD = replace(_OPTQ, name="zfold", zfold=True)
# columns with large inputs are rounded more finely, by a factor that is folded away, and then clipped; the
# grids are searched with the Hessian, where the AWQ paper searches the clip alone, and not for Q and K
_AWQ = Method(name="awq", search=True, awq=True)
# the rounding of each layer is learned, for the error of the layer's own output
_ADAROUND = Method(name="adaround", search=True, learn="all")
# up or down is learned by forward passes of a whole sublayer: first attention, then the feed-forward network
_BRECQ = Method(
    name="brecq", search=True, tune_blocks=True, parametrization="rounding", unit="sublayer", epochs=24
)
# the range of each grid and a factor of each column are learned; every integer is the nearest one
_OMNIQUANT = Method(name="omniquant", tune_blocks=True, parametrization="clipping", epochs=10)
# an invertible matrix stands in place of OmniQuant's factors between values and output
_AFFINEQUANT = replace(_OMNIQUANT, name="affinequant", parametrization="affine")
# OPTQ that knows the attention scores, so that rows of a head make up for each other; the output projection's
# share in the paper's loss of V, which couples its rows, is left out as in aespa's
_BOA = replace(_OPTQ, name="boa", optq_rows=True, query_key="attention", value="attention")
# grids, start and learned rounding know the attention: the paper, with the changes that docs/algorithm.md
# (section How far this is the paper's algorithm) lists
_AESPA = replace(
    _ZFOLD,
    name="aespa",
    query_key="attention",
    value="attention",
    learn="all",
    keep_best=True,
    polish=True,
    input_correction=0.5,  # docs/correction.md
)
# nothing is learned: aespa's grids and OPTQ's update, then coordinate descent
_AESPA_FAST = replace(_AESPA, name="aespa-fast", learn="none")

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        _RTN,
        _OPTQ,
        _ZFOLD,
        _AWQ,
        _ADAROUND,
        _BRECQ,
        _OMNIQUANT,
        _AFFINEQUANT,
        _BOA,
        _AESPA_FAST,
        # the rounding of Q, K and V alone is learned: their attention-wise loss differs from the layer's
        replace(_AESPA, name="aespa-hybrid", learn="attention"),
        _AESPA,
        # after aespa-fast, blocks as a whole and the model end to end are trained
        replace(_AESPA_FAST, name="aespa-tuned", tune_blocks=True, tune_model=True),
    )
}
"""Each method by the value of quantization.method, in the order of tables."""
