"""TensorBoard's own reader finds what was shown to it."""

from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

from aespa_pl.report.tensorboard import LossesFirst, show_configuration, show_result


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def test_the_configuration_is_in_the_text_tab(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        show_configuration(writer, "model:\n  pretrained: embedded:opt\n")
    (event,) = read(tmp_path).Tensors("configuration/text_summary")
    assert event.tensor_proto.string_val[0].decode() == ("    model:\n      pretrained: embedded:opt\n")


class Logging(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = (self.weight * batch[0]).square().sum()
        self.log("loss_reconstruction/q_proj", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_the_first_group_of_curves_is_the_losses(tmp_path: Path) -> None:
    """TensorBoard opens the first group by name; Lightning adds the curve epoch to all that it logs."""
    logger = LossesFirst(tmp_path, name="", version="")
    trainer = Trainer(
        max_epochs=1, logger=logger, log_every_n_steps=1, accelerator="cpu",
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Logging(), DataLoader(TensorDataset(torch.ones(2, 1))))
    logger.finalize("success")
    assert read(tmp_path).Tags()["scalars"] == ["loss_reconstruction/q_proj"]


def test_a_run_is_one_entry_with_its_settings_and_perplexities(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        show_result(writer, {"bits": 2, "group_size": None}, {"quantized": {"wikitext2": 12.5}})
    assert [path for path in tmp_path.rglob("*") if path.is_dir()] == []
    events = read(tmp_path)
    assert [point.value for point in events.Scalars("perplexity/quantized/wikitext2")] == [12.5]
    content = events.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    start = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
    assert start.hparams["bits"].number_value == 2
    assert start.hparams["group_size"].string_value == "None"
