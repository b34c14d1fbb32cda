"""Read the rows of a data set on the Hugging Face hub."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from aespa_pl.errors import UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HubRows:
    """Names one split of a data set, or one file of it."""

    repository: str
    split: str
    local_copy: str
    """Local copy that the error suggests where the hub can't be reached."""
    config: str | None = None
    file: str | None = None
    """File of the repository to read, such as one shard of C4; None: the whole split."""
    revision: str | None = None
    field: str = "text"

    @property
    def identity(self) -> dict[str, str | None]:
        """Return the names that decide which rows these are; cached tokens are found by them, offline."""
        identity = asdict(self)
        del identity["local_copy"]
        return identity

    def load(self, key: str) -> Sequence[str]:
        """Return the rows' texts, read from the disk one by one as they are asked for.

        Args:
            key: YAML key that names the data set, for messages.

        Raises:
            UserError: The data set can't be had, for whatever reason.
        """
        # a hub that can't be reached is tried for half a minute
        log.warning("%s: asking the Hugging Face hub for %s", key, self.repository)
        import datasets  # noqa: PLC0415 - 1 s, and not needed once the tokens are cached

        try:
            rows = datasets.load_dataset(
                self.repository,
                self.config,
                data_files=None if self.file is None else {self.split: self.file},
                split=self.split,
                revision=self.revision,
            )
            texts: Sequence[str] = rows[self.field]
        except Exception as error:  # no network, moved, gated, disk full: the remedy is the same
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(
                f"{key}: cannot load {self.repository} from the Hugging Face hub ({reason}); give "
                f"the path of a local copy instead: {self.local_copy}"
            ) from error
        return texts
