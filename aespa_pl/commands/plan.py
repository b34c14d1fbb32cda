"""Run ``aespa-pl plan``."""

from collections.abc import Sequence

from aespa_pl.commands.arguments import Arguments
from aespa_pl.commands.estimate import estimate
from aespa_pl.run.interruption import Interruption


def run(words: Sequence[str], interruption: Interruption) -> None:  # noqa: ARG001 - as all commands
    """Estimate what ``fit`` needs.

    Args:
        words: The command and its options, already checked by :mod:`aespa_pl.commands.mistakes`.
        interruption: Isn't asked: nothing is written.

    Raises:
        UserError: fit would refuse this.
    """
    estimate(Arguments.read(words[1:]))
