"""BRECQ learns whether each weight is rounded up or down, by forward passes of a whole sublayer.

First the attention's output is reconstructed, then the feed-forward network's.
"""

from aespa_pl.methods.method import Method

METHOD = Method(
    name="brecq",
    source="arXiv 2102.05426",
    search=True,
    tune_blocks=True,
    parametrization="rounding",
    unit="sublayer",
    epochs=24,
)
