"""aespa-hybrid learns the rounding of Q, K and V alone, for which the attention-wise loss differs."""

from dataclasses import replace

from aespa_pl.methods import aespa

METHOD = replace(aespa.METHOD, name="aespa-hybrid", learn="attention")
