"""RTN is nearest rounding on min-max grids, and takes no step at all."""

from aespa_pl.methods.method import Method

METHOD = Method(name="rtn", source="Section 4.2 of the aespa paper")
