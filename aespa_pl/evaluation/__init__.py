"""How good a quantized model is."""
