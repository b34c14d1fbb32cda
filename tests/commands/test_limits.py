"""Settings that a model cannot have are refused with what it can."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from aespa_pl.commands.limits import check_bits_of, check_evaluation, check_length
from aespa_pl.errors import UserError
from aespa_pl.models import family_of
from aespa_pl.planning.shape import Devices
from aespa_pl.settings import QuantizationSettings
from tests.jobs import embedded, prepared
from tests.models.examples import make_model


def check(name: str, bits_of: dict[str, int]) -> None:
    config = make_model(name).config
    check_bits_of(family_of(config).layouts(config), QuantizationSettings(bits=2, bits_of=bits_of))


def test_parts_of_one_matrix_need_the_same_bits() -> None:
    with pytest.raises(UserError, match=r"query: 2, key: 2, value: 4 in block 0 are one matrix .*: give all"):
        check("bloom", {"value": 4})
    with pytest.raises(UserError, match=r"query: 2, key: 3, value: 3 in block 1 are one matrix"):
        check("bloom", {"1": 3, "1.query": 2})
    check("bloom", {"query": 4, "key": 4, "value": 4, "1": 3})
    check("opt", {"v_proj": 4})


def test_parts_of_one_matrix_need_the_same_type() -> None:
    """Also where both types have as many bits: one has minimums."""
    config = make_model("phi3").config
    types = {f"{i}.{name}": "Q4_0" for i in range(2) for name in ("q_proj", "k_proj")}
    types |= {"0.v_proj": "Q4_1", "1.v_proj": "Q4_0"}
    settings = QuantizationSettings(format="Q4_0", types=types)
    with pytest.raises(UserError, match=r"types: q_proj: Q4_0, .* v_proj: Q4_1 in block 0 .* same type$"):
        check_bits_of(family_of(config).layouts(config), settings)


def test_a_length_that_the_user_did_not_give_is_said_to_be_the_default() -> None:
    with pytest.raises(
        UserError, match=r"^data\.calibration\.segment_length is 2048 \(the default\), but m has"
    ):
        check_length("calibration", 2048, 32, "m")
    for section, length in (("calibration", 64), ("evaluation", 2048)):
        with pytest.raises(UserError, match=rf"segment_length is {length}, but m has 32 positions"):
            check_length(section, length, 32, "m")


def test_hidden_states_of_a_text_that_do_not_fit_are_refused_with_how_many_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = prepared(embedded("llama")).setup()
    texts = {"short": torch.zeros(1, 16), "long": torch.zeros(10, 16)}
    of_segment = 16 * setup.shape.hidden * 4
    monkeypatch.setattr("aespa_pl.commands.limits.free_bytes", lambda _: 10 * of_segment)
    check_evaluation(texts, setup, tmp_path, compares=False)
    check_evaluation({}, setup, tmp_path, compares=True)
    with pytest.raises(UserError, match=r"states of long .*max_segments to 2, or data.hidden_states to disk"):
        check_evaluation(texts, setup, tmp_path, compares=True)
    on_disk, on_device = (
        replace(setup, data=replace(setup.data, hidden_states=place)) for place in ("disk", "device")
    )
    check_evaluation(texts, on_disk, tmp_path, compares=True)
    check_evaluation(texts, replace(on_device, devices=Devices(2)), tmp_path, compares=True)
    with pytest.raises(UserError, match=r"KB of host memory, which has .* KB free"):
        check_evaluation(texts, replace(setup, devices=Devices(2)), tmp_path, compares=True)
