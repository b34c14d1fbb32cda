"""AWQ rounds columns with large inputs more finely, by a factor that is folded away, and then clips.

The grids are searched with the Hessian; the AWQ paper searches the clip alone, and not for Q and K.
"""

from aespa_pl.methods.method import Method

METHOD = Method(name="awq", source="arXiv 2306.00978", search=True, awq=True)
