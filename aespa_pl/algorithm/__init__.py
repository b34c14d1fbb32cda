"""Compute aespa's mathematics with pure functions on the tensors of one projection.

Notation, in all files of this folder: ``W [heads, rows, d_in]`` is the original weight of one projection.
Where all rows share one Hessian ``heads`` is 1; the value projection has one Hessian a head. ``H [heads,
d_in, d_in]`` is the damped Hessian, ``dW = W_hat - W`` the quantization error, ``G [heads, d_head, d_head]``
the second moment of the other side of the attention score. Integers are held as floating-point tensors while
they are searched for, ``0 .. largest`` with ``largest = 2 ** bits - 1``.

Source: "Towards Next-Level Post-Training Quantization of Hyper-Scale Transformers", NeurIPS 2024.
"""
