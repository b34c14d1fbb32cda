"""The folder of a run: its journal, checkpoints, versions and the quantized model."""
