"""Name the curves and histograms of a run, for the parts that log them and the report that draws them.

A tag is a name, a slash, and the projection or kind: ``loss_reconstruction/q_proj``.
"""

RECONSTRUCTION = "loss_reconstruction"
"""Loss of a projection while its rounding is learned."""
PENALTY = "loss_rounding"
"""Rounding loss of a projection, its weight included."""
UNDECIDED = "share_undecided"
"""Share of a projection's weights that are still between two integers."""
NOT_NEAREST = "share_not_nearest"
"""Share of a projection's integers that are not the nearest; the journal has the final share as well."""
ROUNDING_VARIABLES = "rounding_variables"
"""Histograms of h(B) of a projection."""
DESCENT = "loss_after_passes"
"""Loss of a projection beside that of nearest rounding: at step 0 of the OPTQ update, then after each pass of
the coordinate descent."""
TUNING = "tuning"
"""Errors of a tuning, by kind."""
HELD_BACK = "held_back_error"
"""Kind: error on text that nothing is trained on."""
TRAINING = "training_error"
"""Kind: error of the mini-batch."""
ATTENTION, FEED_FORWARD = "attention", "feed_forward"
"""Sublayers that are tuned by themselves, with curves of their own: ``block_NNN_attention``."""


def tag(name: str, kind: str) -> str:
    """Return the tag of the curve of a projection, or of a kind of error."""
    return f"{name}/{kind}"
