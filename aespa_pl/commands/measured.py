"""Store what ``aespa-pl test`` measured, beside the model."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aespa_pl.errors import UserError
from aespa_pl.evaluation.table import result_table
from aespa_pl.storage.files import write_json, write_text

log = logging.getLogger(__name__)


def store(folder: Path, metrics: Mapping[str, Any], method: str) -> None:
    """Write ``test.json``, and the same as a table, ``test.md``.

    A folder that can't be written to, such as a read-only cache, costs a warning alone: the table is
    printed as well, and measuring it may have taken hours.

    Args:
        folder: Folder of a run or of a packed model.
        metrics: What was measured.
        method: Name of the quantized model's row.
    """
    try:
        write_json(folder / "test.json", metrics)
        write_text(folder / "test.md", result_table(metrics, method).markdown())
    except UserError as error:
        log.warning("the results are printed but not stored: %s", error)
