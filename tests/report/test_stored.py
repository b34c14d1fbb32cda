"""What a run has stored is found and read; what is missing or damaged is said."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch.utils.tensorboard import SummaryWriter

from aespa_pl.errors import UserError
from aespa_pl.report.curves import read_curves
from aespa_pl.report.stored import read_run
from tests.report.simulated import PROJECTIONS, WIDTH, simulate


def test_losses_curves_and_settings_are_those_that_were_stored(tmp_path: Path) -> None:
    folder = simulate(tmp_path / "a/version_0", 2, bits=3)
    run = read_run(folder)
    journal = json.loads((folder / "journal.json").read_text())
    assert run.losses[1, "v_proj"] == journal["blocks"]["1"]["losses"]["v_proj"]
    assert run.projections == list(PROJECTIONS)
    assert run.settings["quantization.bits"] == 3
    curve = run.curves.of("share_not_nearest")[1, "q_proj"]
    assert curve.steps[:2].tolist() == [20, 200]
    assert curve.values[0] == pytest.approx(0.1 + 0.1 * 20 / 2000 + 1 / 1000)
    assert run.notes == ()


def test_bits_per_weight_count_scales_and_zero_points(tmp_path: Path) -> None:
    run = read_run(simulate(tmp_path / "a/version_0", 2, bits=3))
    # each row of WIDTH weights of 3 bits has a scale of 16 bits and a zero point of 3
    assert run.shape["bits_per_weight"] == pytest.approx((3 * WIDTH + 16 + 3) / WIDTH)
    assert run.shape["weights"] == 2 * len(PROJECTIONS) * WIDTH**2


def test_bits_per_weight_count_projections_with_bits_of_their_own(tmp_path: Path) -> None:
    folder = simulate(tmp_path / "a/version_0", 2, bits=3)
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    settings["quantization"]["bits_of"] = {"0": 5, "1.v_proj": 8}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    each = [5] * len(PROJECTIONS) + [8] + [3] * (len(PROJECTIONS) - 1)
    mean = sum(bits * WIDTH + 16 + bits for bits in each) / (len(each) * WIDTH)
    assert read_run(folder).shape["bits_per_weight"] == pytest.approx(mean)


def test_a_run_without_metrics_says_so_and_how_to_go_on(tmp_path: Path) -> None:
    folder = simulate(tmp_path / "a name/version_0", 2, finished=False)
    (folder / "model" / "config.json").write_text('{"num_hidden_layers": 7}')
    run = read_run(folder)
    (note,) = run.notes
    assert "still going, or it was stopped. 2 of 7 blocks are finished" in note
    continued = shlex.split(note.partition("Continue it with: ")[2])
    assert continued == ["aespa-pl", "fit", "--ckpt_path", str(folder)]
    assert shlex.split(run.command) == ["aespa-pl", "fit", "--config", str(folder / "config.yaml")]


def test_a_run_of_an_older_version_is_shown_and_named(tmp_path: Path) -> None:
    folder = simulate(tmp_path / "a/version_0", 1)
    journal = json.loads((folder / "journal.json").read_text())
    (folder / "journal.json").write_text(json.dumps({**journal, "format": 1}))
    run = read_run(folder)
    assert len(run.losses) == len(PROJECTIONS)
    assert "An older version of aespa-pl wrote this run" in run.notes[0]


def test_a_run_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    folder = simulate(tmp_path / "a/version_0", 1)
    journal = json.loads((folder / "journal.json").read_text())
    (folder / "journal.json").write_text(json.dumps({**journal, "format": 1000}))
    with pytest.raises(UserError, match="newer version of aespa-pl: update aespa-pl"):
        read_run(folder)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"format": 2, "blocks": {"0": 1}}'])
def test_a_damaged_journal_is_refused_by_name(tmp_path: Path, content: str) -> None:
    folder = simulate(tmp_path / "a/version_0", 1)
    (folder / "journal.json").write_text(content)
    with pytest.raises(UserError, match=r"journal\.json is damaged"):
        read_run(folder)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("blocks/block_000.safetensors", "blocks/block_000.safetensors cannot be read"),
        ("metrics.json", "metrics.json cannot be read"),
        ("config.yaml", "config.yaml cannot be read"),
        ("model/quantization.json", "quantization.json cannot be read"),
    ],
)
def test_a_damaged_file_costs_its_own_figures_only(tmp_path: Path, name: str, words: str) -> None:
    folder = simulate(tmp_path / "a/version_0", 2)
    (folder / name).write_text("{ : damaged")
    run = read_run(folder)
    assert [words in note for note in run.notes] == [True]
    assert len(run.losses) == 2 * len(PROJECTIONS)


def test_an_event_file_that_ends_in_the_middle_is_read_so_far(tmp_path: Path) -> None:
    folder = simulate(tmp_path / "a/version_0", 1, extras=False)
    (events,) = (folder / "block_000").iterdir()
    whole = len(read_curves(folder).of("loss_reconstruction")[0, "q_proj"].values)
    events.write_bytes(events.read_bytes()[:700])
    assert 0 < len(read_curves(folder).of("loss_reconstruction")[0, "q_proj"].values) < whole


def test_histograms_on_equal_bins_keep_the_shares_of_the_values(tmp_path: Path) -> None:
    values = torch.rand(20_000, generator=torch.Generator().manual_seed(0)) ** 2
    with SummaryWriter(str(tmp_path / "block_004")) as writer:
        writer.add_histogram("rounding_variables/q_proj", values, 7, bins=1000)
    series = read_curves(tmp_path).histograms["rounding_variables"][4, "q_proj"]
    counts, _ = np.histogram(values.numpy(), bins=series.edges)
    assert series.steps.tolist() == [7]
    np.testing.assert_allclose(
        series.shares[0], counts / len(values), atol=2e-3
    )  # edges within a bin


def test_curves_of_older_runs_are_found_under_their_older_names(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path / "block_000")) as writer:
        writer.add_scalar("reconstruction_loss/q_proj", 2.5, 20)
    assert read_curves(tmp_path).of("loss_reconstruction")[0, "q_proj"].values.tolist() == [2.5]
