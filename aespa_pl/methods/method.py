"""Define what tells one method of quantization from another."""

from dataclasses import dataclass
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
    source: str
    """Paper that the method is from."""
    search: bool = False
    """Step 2: search the clip of each grid for the least loss; off: from the smallest to the largest
    weight."""
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
