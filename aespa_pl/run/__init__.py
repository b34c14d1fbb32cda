"""Write and read the folder of a run: journal, checkpoints, versions and the quantized model."""
