"""AdaRound learns the rounding of each layer, for the error of the layer's own output."""

from aespa_pl.methods.method import Method

METHOD = Method(name="adaround", source="arXiv 2004.10568", search=True, learn="all")
