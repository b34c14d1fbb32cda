"""Read what a run measured at its end, joined with what ``aespa-pl test`` measured later."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aespa_pl.evaluation.table import KINDS
from aespa_pl.run.schema import Content, DamagedFileError, Measured, parse


def measured(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Return what ``fit`` and a later ``test`` measured, and a sentence about each file that is damaged."""
    contents, notes = list[dict[str, Any]](), list[str]()
    for name in ("metrics.json", "test.json"):
        content = known(Measured, folder / name, notes, "measure again with aespa-pl test") or Measured()
        contents.append({k: v for k, v in content.model_dump(exclude_none=True).items() if v})
    return with_later(*contents), notes


def known(kind: type[Content], path: Path, notes: list[str], consequence: str) -> Content | None:
    """Return a file of a run, None without it; one that is damaged becomes a note with its consequence."""
    try:
        return parse(kind, path) if path.exists() else None
    except (OSError, DamagedFileError) as error:
        notes.append(f"{path.name} is damaged ({error}): {consequence}")
        return None


def with_later(metrics: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's ``metrics.json``, with what a later test measured (``test.json``) in its place.

    A text that was measured again is replaced for all kinds of model, because its segments may be others.
    Where the original's perplexity is the same number they are not, and round-to-nearest, which was not
    measured again, stays. Either may be empty.
    """
    before, after = metrics.get("perplexity", {}), later.get("perplexity", {})
    again = {text for values in after.values() for text in values}
    original = after.get("original", {}).items() & before.get("original", {}).items()
    replaced = again - {text for text, _ in original}
    joined = {}
    for kind in KINDS:
        new = after.get(kind, {})
        both = before.get(kind, {}) | new
        if values := {text: x for text, x in both.items() if text in new or text not in replaced}:
            joined[kind] = values
    return {**metrics, **later, **({"perplexity": joined} if joined else {})}
