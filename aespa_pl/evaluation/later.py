"""Join what a run measured at its end with what ``aespa-pl test`` measured later."""

import logging
from collections.abc import Mapping
from typing import Any

from aespa_pl.evaluation.table import KINDS
from aespa_pl.run.journal import Run
from aespa_pl.run.schema import DamagedFileError, Perplexities, parse

log = logging.getLogger(__name__)


def measured(run: Run) -> dict[str, Any]:
    """Return what ``fit`` and a later ``test`` measured; a damaged file costs a warning alone."""
    found = list[dict[str, Any]]()
    for path in (run.metrics_file, run.folder / "test.json"):
        try:
            found.append(parse(Perplexities, path).model_dump() if path.exists() else {})
        except (OSError, DamagedFileError) as error:
            log.warning("%s is damaged (%s): measure again with aespa-pl test", path, error)
            found.append({})
    return with_later(*found)


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
    found = {}
    for kind in KINDS:
        new = after.get(kind, {})
        both = before.get(kind, {}) | new
        if values := {text: x for text, x in both.items() if text in new or text not in replaced}:
            found[kind] = values
    return {**metrics, **later, **({"perplexity": found} if found else {})}
