"""OmniQuant learns the range of each grid and a factor of each column, and nothing else.

Every integer is the nearest one on its grid.
"""

from aespa_pl.methods.method import Method

METHOD = Method(
    name="omniquant",
    source="arXiv 2308.13137",
    tune_blocks=True,
    parametrization="clipping",
    epochs=10,
)
