"""aespa-fast, then every block trained as a whole, then the model end to end (docs/tuning.md).

Learning the rounding of single projections before the blocks are trained costs more than it gains.
"""

from dataclasses import replace

from aespa_pl.methods import aespa_fast

METHOD = replace(aespa_fast.METHOD, name="aespa-tuned", tune_blocks=True, tune_model=True)
