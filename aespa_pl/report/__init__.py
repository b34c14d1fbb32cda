"""The report: one HTML page about one run or several, drawn from what the runs have stored."""
