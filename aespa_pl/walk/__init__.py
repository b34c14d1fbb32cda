"""The order of things: one Transformer block after the other."""
