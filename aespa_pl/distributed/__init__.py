"""Run several processes, one for each device: divide their work, start them and end them."""
