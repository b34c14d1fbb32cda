"""TensorBoard's own reader finds what was shown to it."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2
from torch.utils.tensorboard import SummaryWriter

from aespa_pl.report.tensorboard import show_configuration, show_result


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def test_the_configuration_is_in_the_text_tab(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        show_configuration(writer, "model:\n  pretrained: embedded:opt\n")
    (event,) = read(tmp_path).Tensors("configuration/text_summary")
    assert event.tensor_proto.string_val[0].decode() == (
        "    model:\n      pretrained: embedded:opt\n"
    )


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
