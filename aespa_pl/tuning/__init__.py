"""Train quantized blocks against the original's, and the quantized model end to end."""
