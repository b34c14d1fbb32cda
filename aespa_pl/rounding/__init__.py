"""Run step 4 as a Lightning training, which learns the rounding variables of a block."""
