"""Run step 4 as a Lightning training, which learns the rounding variables of a block.

``ProjectionRounding`` holds the variables of one projection, ``BlockRounding`` is the LightningModule of all
of them, and ``StatisticsDataModule`` delivers the statistics that their losses need.
"""

from aespa_pl.rounding.data import StatisticsBatch, StatisticsDataModule
from aespa_pl.rounding.module import BlockRounding, ProjectionRounding

__all__ = ["BlockRounding", "ProjectionRounding", "StatisticsBatch", "StatisticsDataModule"]
