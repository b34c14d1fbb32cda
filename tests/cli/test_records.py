"""A run records curves, losses and perplexities, which TensorBoard and the report show."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2
from transformers import AutoModelForCausalLM

from aespa_pl.curve_names import HELD_BACK, TRAINING, TUNING, tag
from tests.cli.commands import LENGTH, NO_TEXTS, CommandLine, Done, small


def test_curves_of_every_projection_of_every_block(finished: Done) -> None:
    for block in ("block_000", "block_001"):
        events = EventAccumulator(str(finished.run / block))
        events.Reload()
        tags = events.Tags()["scalars"]
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
            points = events.Scalars(f"loss_reconstruction/{name}")
            assert [point.step for point in points] == [4, 9]
            assert all(math.isfinite(point.value) for point in points)
            assert f"share_undecided/{name}" in tags


def test_curves_over_the_blocks(aespa: CommandLine, model: Path) -> None:
    polish = ("--quantization.polish.enabled", "true", "--quantization.method", "aespa-fast")
    assert aespa("fit", *small(model), *NO_TEXTS, *polish)[0] == 0
    run = Path("lightning_logs/aespa/version_0")
    journal = json.loads((run / "journal.json").read_text())
    events = EventAccumulator(str(run / "walk"))
    events.Reload()
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
        for block, points in enumerate(
            zip(
                events.Scalars(f"loss_relative_to_nearest/{name}"),
                events.Scalars(f"polish_loss_of_before/{name}"),
                events.Scalars(f"polish_changed/{name}"),
                events.Scalars(f"polish_passes/{name}"),
                strict=True,
            )
        ):
            assert [point.step for point in points] == [block] * 4
            losses = journal["blocks"][str(block)]["losses"][name]
            expected = [
                losses["final"] / losses["nearest"],
                losses["final"] / losses["before_polish"],
                losses["polish_changed"],
                losses["polish_passes"],
            ]
            assert [point.value for point in points] == pytest.approx(expected)
    assert len(events.Scalars("seconds/statistics")) == 2
    passes = EventAccumulator(str(run / "block_001"))  # nothing is learned: the passes are its steps
    passes.Reload()
    for name in ("q_proj", "o_proj"):
        curve, losses = (passes.Scalars(f"loss_after_passes/{name}"), journal["blocks"]["1"]["losses"])
        known = losses[name]
        assert [point.step for point in curve] == list(range(int(known["polish_passes"]) + 1))
        values = [point.value for point in curve]
        assert values == sorted(values, reverse=True)
        ends = (known["optq"] / known["nearest"], known["final"] / known["nearest"])
        assert (values[0], values[-1]) == pytest.approx(ends, rel=1e-4)


def test_report_takes_several_runs_or_the_last(
    aespa: CommandLine, finished: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures are left empty, as it takes seconds to draw them."""
    pytest.importorskip("matplotlib", reason="the report's figures need matplotlib")
    monkeypatch.setattr("aespa_pl.report.page.for_page", lambda *_: '<svg viewBox="0 0 1 1"></svg>')
    runs = [finished.copied(name) for name in ("first", "second")]
    (runs[1] / "journal.json").touch()  # the newer one
    status, out, err = aespa("report", *runs, "--output", "page", "--figures", "none")
    assert (status, out, err) == (0, "page/report.html\n", "")
    page = Path("page/report.html").read_text()
    assert "first/version_0" in page
    assert "second/version_0" in page
    status, out, _ = aespa("report", "last", "--figures", "none")
    assert (status, out) == (0, "lightning_logs/second/version_0/report/report.html\n")


def test_journal_has_what_the_report_shows_of_a_block(model: Path, finished: Done) -> None:
    blocks = json.loads((finished.run / "journal.json").read_text())["blocks"]
    for record in blocks.values():
        assert record["peak_bytes"]["host"] > 10**7
        shares = [losses["share_not_nearest"] for losses in record["losses"].values()]
        assert all(0 <= share < 1 for share in shares), shares
        # in this tiny model the nearest integers of one projection may be the best
        assert sum(share > 0 for share in shares) >= len(shares) - 1
    tokens = calibration_tokens_of(model)
    original, quantized = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(
            tokens, output_hidden_states=True
        ).hidden_states
        for folder in (model, finished.run / "model")
    )
    before, after = (states[1].detach() for states in (original, quantized))
    # after block 0: the last block has the final norm behind it
    expected = float((after - before).square().sum() / before.square().sum())
    assert blocks["0"]["output_error"]["rounded"] == pytest.approx(expected, rel=1e-4)
    assert "output_error" not in blocks["1"]  # nothing is run through the last block


def calibration_tokens_of(model: Path) -> torch.Tensor:
    """Return the calibration segments of ``small``, which the run has put into its cache."""
    (cached,) = [
        tensors["tokens"]
        for path in (model.parent / "cache").rglob("*.safetensors")
        if (tensors := load_file(path)).get("tokens", torch.empty(0)).shape == (4, LENGTH)
    ]
    return cached


def test_tensorboard_shows_configuration_and_result(finished: Done) -> None:
    events = EventAccumulator(str(finished.run / "walk"))
    events.Reload()
    assert "configuration/text_summary" in events.Tags()["tensors"]
    perplexity = json.loads((finished.run / "metrics.json").read_text())["perplexity"]
    for kind, texts in perplexity.items():
        (point,) = events.Scalars(f"perplexity/{kind}/embedded")
        assert point.value == pytest.approx(texts["embedded"], rel=1e-6)
    content = events.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    shown = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    # what the method decides is shown as it was run
    assert shown["optq.enabled"].number_value == 1
    assert shown["input_correction"].number_value == 0.5


def test_histograms_of_chosen_projections(aespa: CommandLine, model: Path) -> None:
    assert aespa("fit", *small(model), *NO_TEXTS, "--output.histograms", "[q_proj]")[0] == 0
    folder = Path("lightning_logs/aespa/version_0/block_001")
    events = EventAccumulator(str(folder), {"histograms": 0})  # all of them, not the last
    events.Reload()
    assert events.Tags()["histograms"] == ["rounding_variables/q_proj"]
    entries = events.Histograms("rounding_variables/q_proj")
    assert [entry.step for entry in entries] == [1, 5, 10]
    for entry in entries:
        values = entry.histogram_value
        assert values.num == 16 * 16
        assert 0 <= values.min <= values.max <= 1


def test_curves_of_the_papers_system(aespa: CommandLine) -> None:
    """The configuration of OPT-125M learns rounding, then trains blocks and the model; here in small."""
    Path("small.yaml").write_text(
        "model: {pretrained: embedded:opt}\n"
        "data:\n"
        "  calibration: {source: embedded, segments: 6, segment_length: 32}\n"
        "  evaluation: {texts: []}\n"
        "quantization:\n"
        "  rounding: {iterations: 10}\n"
        "  tuning: {held_back: 0.3, blocks: {epochs: 1}, model: {epochs: 1, batch_size: 1}}\n"
        "trainer: {accelerator: cpu, log_every_n_steps: 1}\n"
    )
    status, out, err = aespa("fit", "--config", "opt125m_w2.yaml", "--config", "small.yaml")
    assert (status, err) == (0, "")
    assert out.startswith(
        "method aespa: rounding of 6 projections a block is learned, then blocks and the model are trained"
    )
    run = Path(out.splitlines()[-1])
    journal = json.loads((run / "journal.json").read_text())
    blocks = len(journal["blocks"])
    lines = [line for line in out.splitlines() if "left for" in line]
    assert len(lines) == blocks - 1
    assert all(
        line.startswith("about ") and line.endswith("end-to-end tuning (an estimate)") for line in lines
    )
    curves = {}
    for folder in ("block_000", f"block_{blocks - 1:03}", "end_to_end"):
        events = EventAccumulator(str(run / folder))
        events.Reload()
        curves[folder] = set(events.Tags()["scalars"])
    learned = {
        f"loss_reconstruction/{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
    }
    trained = {tag(TUNING, TRAINING), tag(TUNING, HELD_BACK)}
    assert learned | trained <= curves["block_000"]
    assert learned | trained <= curves[f"block_{blocks - 1:03}"]
    assert trained <= curves["end_to_end"]
    walk = EventAccumulator(str(run / "walk"))
    walk.Reload()
    of_blocks = [record["tuning"] for record in journal["blocks"].values()]
    for kind, records, first in (("error", of_blocks, 0), ("divergence", [journal["tuned"]], blocks)):
        for when, key in (("before", "start_error"), ("after", "error")):
            points = walk.Scalars(f"tuning/{kind}_{when}")
            assert [point.step for point in points] == list(range(first, first + len(records)))
            assert [point.value for point in points] == pytest.approx([r[key] for r in records], rel=1e-6)
