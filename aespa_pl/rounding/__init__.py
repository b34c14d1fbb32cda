"""Step 4 as a Lightning training: ``BlockRounding`` learns, ``BlockStatistics`` delivers."""

from aespa_pl.rounding.data import BlockStatistics, StatisticsBatch
from aespa_pl.rounding.module import BlockRounding, NonFiniteLossError, RoundingTask

__all__ = [
    "BlockRounding",
    "BlockStatistics",
    "NonFiniteLossError",
    "RoundingTask",
    "StatisticsBatch",
]
