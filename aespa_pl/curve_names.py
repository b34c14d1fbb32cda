"""Name the curves and histograms of a run. A tag is a name, a slash, and the projection or kind."""

RECONSTRUCTION, PENALTY = "loss_reconstruction", "loss_rounding"
"""Losses of a projection while its rounding is learned, the rounding loss with its weight."""
UNDECIDED, NOT_NEAREST = "share_undecided", "share_not_nearest"
"""Shares of a projection's weights that are between two integers, and not at the nearest one."""
ROUNDING_VARIABLES = "rounding_variables"
"""Histograms of h(B) of a projection."""
DESCENT = "loss_after_passes"
"""Loss of a projection beside that of nearest rounding: at step 0 of the integers that the coordinate descent
begins with, then after each of its passes."""
TUNING, HELD_BACK, TRAINING = "tuning", "held_back_error", "training_error"
"""Errors of a tuning, of two kinds: on text that nothing is trained on, and of the mini-batch."""
ATTENTION, FEED_FORWARD = "attention", "feed_forward"
"""Sublayers that are tuned by themselves, with curves of their own: ``block_NNN_attention``."""


def tag(name: str, kind: str) -> str:
    """Return the tag of the curve of a projection, or of a kind of error."""
    return f"{name}/{kind}"
