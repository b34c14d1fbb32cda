"""Step 1 collects the statistics of a block over the calibration segments."""
