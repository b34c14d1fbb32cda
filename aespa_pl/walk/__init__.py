"""Quantize one Transformer block after the other, in the order of all steps."""
