"""The page shows what was chosen for a size, and what more bytes would buy."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from aespa_pl.report.stored import read_run
from tests.report.pages import write_page
from tests.report.simulated import simulate

if find_spec("matplotlib") is None:
    pytest.skip("matplotlib is not installed", allow_module_level=True)

from aespa_pl.report.maps import size_curve, width_map

MIXTURE = {
    "chosen": {"embedding": "Q6_K", "0.q_proj": "Q2_K", "0.v_proj": "Q4_K", "1.q_proj": "Q8_0"},
    "predicted": 0.02,
    "bytes": 1_000_000,
    "curve": [[800_000, 0.1], [1_000_000, 0.02], [1_100_000, 0.005], [9_000_000, 0.0]],
    "others": {"Q3_K_S": [1_050_000, 0.03], "Q8_0": [5_000_000, 0.0001]},
}


def sized(folder: Path) -> Path:
    simulate(folder, 2)
    (folder / "mixture.json").write_text(json.dumps(MIXTURE))
    divergence = {"quantized": {"wiki": {"mean": 0.025, "rare": 0.3, "same_top": 0.9}}}
    (folder / "test.json").write_text(json.dumps({"divergence": divergence}))
    return folder


def test_widths_and_curve_are_those_of_the_choice(tmp_path: Path) -> None:
    run = read_run(sized(tmp_path / "run/version_0"))
    assert run.mixture is not None
    widths, curve = width_map(run, run.mixture, 8.0), size_curve(run, run.mixture, 8.0)
    assert widths.caption == "Chosen are 1 x Q2_K, 1 x Q4_K, 1 x Q6_K, 1 x Q8_0 (embedding: Q6_K)."
    assert widths.figure is not None
    numbers = {text.get_text() for text in widths.figure.axes[0].texts}
    assert numbers == {"2.62", "4.50", "8.50"}  # 84, 144 bytes of 256 weights, 34 of 32
    assert curve.figure is not None
    (axes,) = curve.figure.axes
    assert np.asarray(axes.lines[0].get_xdata()).tolist() == [0.8, 1.0, 1.1]
    assert [text.get_text() for text in axes.texts] == ["Q3_K_S"]
    assert "0.02 nats per token are predicted for 1,000,000 bytes" in curve.caption
    assert "Measured are 0.025 on wiki" in curve.caption
    assert "take away 75 %" in curve.caption


def test_the_page_has_both_and_a_damaged_file_becomes_a_note(tmp_path: Path) -> None:
    folder = sized(tmp_path / "run/version_0")
    text = write_page(tmp_path / "page", folder).read_text()
    assert 'id="section-widths"' in text
    assert 'id="section-sizes"' in text
    (folder / "mixture.json").write_text('{"predicted": -1}')
    text = write_page(tmp_path / "again", folder).read_text()
    assert "mixture.json is damaged" in text
    assert 'id="section-widths"' not in text


@pytest.mark.parametrize(
    "wrong", [{"chosen": {"0.q_proj": "Q9_X"}}, {"chosen": {"x.y": "Q8_0"}}, {"curve": []}]
)
def test_an_unknown_choice_becomes_a_note(wrong: dict[str, object], tmp_path: Path) -> None:
    folder = sized(tmp_path / "run/version_0")
    (folder / "mixture.json").write_text(json.dumps(MIXTURE | wrong))
    assert "mixture.json is damaged" in write_page(tmp_path / "page", folder).read_text()
