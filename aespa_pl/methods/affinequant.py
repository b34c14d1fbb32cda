"""AffineQuant is OmniQuant with an invertible matrix in place of the factors between values and output."""

from dataclasses import replace

from aespa_pl.methods import omniquant

METHOD = replace(
    omniquant.METHOD, name="affinequant", source="arXiv 2403.12544", parametrization="affine"
)
