"""Measure how good a quantized model is."""
