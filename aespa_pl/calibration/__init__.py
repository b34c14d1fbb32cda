"""Step 1: the statistics of a block over the calibration segments."""
