"""aespa-tuned is aespa-fast, after which blocks as a whole and the model end to end are trained."""

from dataclasses import replace

from aespa_pl.methods import aespa_fast

METHOD = replace(aespa_fast.METHOD, name="aespa-tuned", tune_blocks=True, tune_model=True)
