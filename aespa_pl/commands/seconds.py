"""Add up the seconds of a run, of all processes that have worked on it."""

from aespa_pl.run.journal import Run

PHASES = (
    "statistics",
    "correction",
    "grid",
    "optq",
    "rounding",
    "polish",
    "tuning",
    "writing",
    "forward",
    "tuning the model",
)
"""Phases whose seconds the journal has, of each block and at the end of the model, in their order."""


def phase_seconds(run: Run) -> dict[str, float]:
    """Return the seconds of each phase, of all complete blocks and of the end-to-end tuning."""
    stored = [record.seconds for record in run.blocks.values()]
    if run.tuned is not None:
        stored.append(run.tuned.seconds)
    return {phase: sum(float(seconds.get(phase, 0)) for seconds in stored) for phase in PHASES}
