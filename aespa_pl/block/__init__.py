"""Run steps 2 to 4 of one block, which lead from weights and statistics to integers."""
