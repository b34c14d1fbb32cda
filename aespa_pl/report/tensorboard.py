"""Show a run in TensorBoard beside its curves: its settings, and an entry among the hparams."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.tensorboard import SummaryWriter


class LossesFirst(TensorBoardLogger):
    """Is Lightning's logger without its curve ``epoch``, which TensorBoard would open before the losses."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log all curves but ``epoch``."""
        super().log_metrics({k: v for k, v in metrics.items() if k != "epoch"}, step)


def show_configuration(writer: SummaryWriter, text: str) -> None:
    """Show the content of a run's ``config.yaml`` in the text tab."""
    lines = "".join(f"    {line}\n" for line in text.splitlines())  # Markdown: code
    writer.add_text("configuration", lines)


def show_result(
    writer: SummaryWriter, settings: Mapping[str, Any], perplexity: Mapping[str, Mapping[str, float]]
) -> None:
    """Add an entry to the hparams tab: settings by keys joined by dots, and perplexities by kind and text."""
    results = {f"perplexity/{kind}/{text}": x for kind, of in perplexity.items() for text, x in of.items()}
    values = {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in settings.items()}
    # run_name ".": torch would make a folder of its own, named by the time, which is a second run
    writer.add_hparams(values, results, run_name=".")
