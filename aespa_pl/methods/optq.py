"""OPTQ (GPTQ) rounds columns in turn, and the later ones make up for the error.

The grids are searched with the Hessian, as in the aespa paper's comparison; the min-max grids of the
OPTQ paper are ``quantization.grid.search false``.
"""

from aespa_pl.methods.method import Method

METHOD = Method(name="optq", source="arXiv 2210.17323", search=True, optq=True)
