"""Draw one HTML page about one run or several, from the files that the runs have stored."""
