"""Segments begin with BOS where the model needs it, or the user wants it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from aespa_pl.commands.job import bos_of
from aespa_pl.errors import UserError
from aespa_pl.models.family import Family
from aespa_pl.models.llama import LlamaFamily
from aespa_pl.models.relatives import Gemma2Family, Gemma3Family
from aespa_pl.settings import DataSettings
from tests.jobs import embedded, prepared

TOKENIZER: Any = SimpleNamespace(bos_token_id=2)
WITHOUT: Any = SimpleNamespace(bos_token_id=None)


@pytest.mark.parametrize(
    ("family", "bos", "expected"),
    [
        (LlamaFamily(), "auto", None),
        (LlamaFamily(), True, 2),
        (Gemma3Family(), "auto", 2),
        (Gemma2Family(), "auto", 2),
        (Gemma3Family(), False, None),
    ],
)
def test_bos_is_the_familys_unless_the_user_says_more(
    family: Family, bos: bool | Literal["auto"], expected: int | None
) -> None:
    assert bos_of(DataSettings(bos=bos), TOKENIZER, family) == expected


def test_a_tokenizer_without_bos_is_refused_only_where_the_user_asks_for_it() -> None:
    assert bos_of(DataSettings(), WITHOUT, Gemma3Family()) is None
    with pytest.raises(UserError, match=r"data\.bos is true, but the tokenizer has no BOS"):
        bos_of(DataSettings(bos=True), WITHOUT, LlamaFamily())


def test_segments_of_a_run_begin_with_bos() -> None:
    settings = embedded("llama")
    job = prepared(replace(settings, data=replace(settings.data, bos=True)))
    bos = job.pretrained.tokenizer().bos_token_id
    for tokens in (job.calibration(), *job.evaluation().values()):
        assert (tokens[:, 0] == bos).all()
    assert not (prepared(settings).calibration()[:, 0] == bos).all()
