"""Count the arithmetic of one iteration for one head: aespa's objectives against whole forward passes.

Both are counts of the paper, for the loss of the query, key and value projections of one head with keys and
values of its own; the backward pass is in neither.

Source: Section 3.5, Eq. 25 and 26, and Appendix "Complexity analysis for conventional block-wise quantization
schemes" of the paper.
"""

SEQUENCES = 4
"""Number of segments in an iteration of the conventional schemes, as in the paper's table."""


def conventional_flops(hidden: int, head: int, length: int, sequences: int = SEQUENCES) -> int:
    """Return the operations of a scheme that computes the attention output of some segments.

    Args:
        hidden: Hidden size d.
        head: Head size d_h.
        length: Tokens L of a segment.
        sequences: Segments B.
    """
    projections = 3 * head * length * (2 * hidden - 1)
    scores_and_output = 4 * head * length**2 - head * length - length**2
    softmax = 3 * length**2 + head * length - length
    error = 3 * head * length - 1
    return sequences * (projections + scores_and_output + softmax + error)


def aespa_flops(hidden: int, head: int) -> int:
    """Return the operations of aespa's losses, which do not depend on the text; arguments as above."""
    value = 2 * head * hidden**2 + head * hidden - 1
    query_or_key = 2 * head * hidden**2 + 2 * head**2 * hidden - 1
    return value + 2 * query_or_key
