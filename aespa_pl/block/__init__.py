"""Steps 2 to 4 of one block: from weights and statistics to integers."""
