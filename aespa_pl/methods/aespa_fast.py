"""aespa-fast learns nothing: it has aespa's grids and OPTQ's update, then coordinate descent."""

from dataclasses import replace

from aespa_pl.methods import aespa

METHOD = replace(aespa.METHOD, name="aespa-fast", learn="none")
