"""Texts become token ids; every setting acts, and the cache gives the same ids."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from aespa_pl.data import tokens
from aespa_pl.data.tokens import calibration_tokens, check_vocabulary, evaluation_tokens, few_tokens
from aespa_pl.errors import UserError
from aespa_pl.settings import CalibrationSettings

WORDS = 900


def text_of(ids: range) -> str:
    return " ".join(f"w{i}" for i in ids)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The word ``w7`` stands where token 7 will be, because the ids count up from 1."""
    path = tmp_path / "text.txt"
    path.write_text(text_of(range(1, WORDS + 1)))
    return path


@pytest.fixture
def settings(file: Path) -> CalibrationSettings:
    return CalibrationSettings(source=str(file), segments=12, seed=5)


@pytest.fixture
def tokenized(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The documents that were tokenized, in order."""
    seen: list[str] = []
    tokenize = tokens.tokenize

    def remember(tokenizer: Any, text: str) -> torch.Tensor:
        seen.append(text)
        return tokenize(tokenizer, text)

    monkeypatch.setattr(tokens, "tokenize", remember)
    return seen


def test_calibration_segments_are_windows_of_the_text(
    settings: CalibrationSettings, tokenizer: PreTrainedTokenizerFast, cache: Path
) -> None:
    found = calibration_tokens(settings, tokenizer, 20, cache)
    assert found.dtype == torch.int64
    assert found.shape == (12, 20)
    for segment in found.tolist():
        assert segment == list(range(segment[0], segment[0] + 20))
    assert len({segment[0] for segment in found.tolist()}) > 1


def test_evaluation_covers_the_text_from_its_start_in_whole_segments(
    file: Path, tokenizer: PreTrainedTokenizerFast, cache: Path
) -> None:
    found = evaluation_tokens(str(file), tokenizer, 40, None, cache)
    assert found.dtype == torch.int64
    assert found.tolist() == [list(range(1 + 40 * i, 41 + 40 * i)) for i in range(22)]


def test_evaluation_stops_after_max_segments(
    file: Path, tokenizer: PreTrainedTokenizerFast, cache: Path
) -> None:
    everything = evaluation_tokens(str(file), tokenizer, 40, None, cache)
    assert evaluation_tokens(str(file), tokenizer, 40, 3, cache).equal(everything[:3])
    assert evaluation_tokens(str(file), tokenizer, 40, 99, cache).equal(everything)


@pytest.mark.parametrize(("asked", "expected"), [(None, 256), (7, 7), (300, 300)])
def test_evaluation_on_c4_takes_256_segments_unless_told_otherwise(
    hub: Any, tokenizer: PreTrainedTokenizerFast, cache: Path, asked: int | None, expected: int
) -> None:
    hub.rows = {"text": ["w1 w2 w3"] * 2000}
    found = evaluation_tokens("c4", tokenizer, 10, asked, cache)
    assert found.shape == (expected, 10)
    assert found.flatten().tolist() == ([1, 2, 3] * 2000)[: expected * 10]


def test_special_tokens_are_added_once_as_the_tokenizer_does(
    file: Path, tokenizer_factory: Callable[..., PreTrainedTokenizerFast], cache: Path
) -> None:
    found = evaluation_tokens(str(file), tokenizer_factory(bos=True), 10, 2, cache)
    assert found.flatten().tolist() == [1000, *range(1, 20)]


def test_bos_takes_the_place_of_the_first_token_of_every_segment(
    file: Path, tokenizer: PreTrainedTokenizerFast, cache: Path
) -> None:
    found = evaluation_tokens(str(file), tokenizer, 40, 3, cache)
    with_bos = evaluation_tokens(str(file), tokenizer, 40, 3, cache, bos=7)
    assert with_bos.tolist() == [[7, *segment[1:]] for segment in found.tolist()]
    assert evaluation_tokens(str(file), tokenizer, 40, 3, cache).equal(found)


def test_ids_of_a_file_stay_as_they_are_beside_a_text_that_begins_with_bos(
    file: Path, tokenizer: PreTrainedTokenizerFast, cache: Path, tmp_path: Path
) -> None:
    ids = tmp_path / "ids.safetensors"
    save_file({"tokens": torch.full((2, 10), 950)}, ids)
    mixed = CalibrationSettings({str(file): 1, str(ids): 1}, segments=4)
    found = calibration_tokens(mixed, tokenizer, 10, cache, bos=7)
    assert sorted(found[:, 0].tolist()) == [7, 7, 950, 950]
    assert evaluation_tokens(str(ids), tokenizer, 10, None, cache, bos=7).eq(950).all()


def test_a_text_longer_than_the_model_gives_no_warning(
    file: Path,
    tokenizer: PreTrainedTokenizerFast,
    caplog: pytest.LogCaptureFixture,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = logging.getLogger("transformers")
    monkeypatch.setattr(library, "propagate", True)
    evaluation_tokens(str(file), tokenizer, 10, None, cache)
    assert "longer than" not in caplog.text
    tokenizer(text_of(range(1, 20)))  # the warning is still there for others
    assert "longer than" in caplog.text


def test_a_text_shorter_than_a_segment_is_refused_with_the_numbers(
    file: Path, tokenizer: PreTrainedTokenizerFast, cache: Path
) -> None:
    with pytest.raises(UserError) as caught:
        evaluation_tokens(str(file), tokenizer, 901, None, cache)
    assert str(caught.value) == (
        f"data.evaluation.texts: {file} has 900 tokens, a segment has 901; choose a shorter "
        "data.evaluation.segment_length, or a longer text"
    )
    assert evaluation_tokens(str(file), tokenizer, 900, None, cache).shape == (1, 900)


def test_calibration_from_too_short_a_text_is_refused(
    settings: CalibrationSettings, tokenizer: PreTrainedTokenizerFast, cache: Path
) -> None:
    with pytest.raises(UserError, match=r"set data\.calibration\.segments \(.*\) to 4 at most"):
        calibration_tokens(settings, tokenizer, 200, cache)
    assert not cache.exists()


def test_a_second_run_does_not_tokenize(
    settings: CalibrationSettings,
    tokenizer_factory: Callable[..., PreTrainedTokenizerFast],
    cache: Path,
    tokenized: list[str],
) -> None:
    def run() -> list[torch.Tensor]:
        tokenizer = tokenizer_factory()
        return [
            calibration_tokens(settings, tokenizer, 20, cache),
            evaluation_tokens(str(settings.source), tokenizer, 20, None, cache),
        ]

    first = run()
    assert len(tokenized) == 2
    second = run()
    assert len(tokenized) == 2
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))


def test_cached_tokens_of_a_hub_text_need_no_hub(
    hub: Any, tokenizer: PreTrainedTokenizerFast, cache: Path
) -> None:
    hub.rows = {"text": [text_of(range(1, WORDS))] * 9}
    settings = CalibrationSettings("c4", segments=3)
    first = calibration_tokens(settings, tokenizer, 20, cache)
    hub.error = ConnectionError("no network")
    assert calibration_tokens(settings, tokenizer, 20, cache).equal(first)
    with pytest.raises(UserError, match="no network"):
        calibration_tokens(replace(settings, seed=1), tokenizer, 20, cache)


@pytest.mark.parametrize("change", [{"seed": 6}, {"segments": 11}, {"source": "other"}])
def test_every_calibration_setting_acts_and_is_never_served_from_an_old_cache(
    settings: CalibrationSettings,
    tokenizer: PreTrainedTokenizerFast,
    cache: Path,
    tmp_path: Path,
    change: dict[str, Any],
) -> None:
    first = calibration_tokens(settings, tokenizer, 20, cache)
    if "source" in change:
        other = tmp_path / "other.txt"
        other.write_text(text_of(range(99, WORDS)))
        change = {"source": str(other)}
    changed = replace(settings, **change)
    second = calibration_tokens(changed, tokenizer, 20, cache)
    assert not torch.equal(first, second)
    assert second.equal(calibration_tokens(changed, tokenizer, 20, cache.with_name("fresh")))


def test_packing_acts_and_is_never_served_from_an_old_cache(
    tokenizer: PreTrainedTokenizerFast, cache: Path, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [text_of(range(i, i + length)) for i in range(1, 10) for length in (7, 29)]
    path.write_text("\n".join(json.dumps({"text": row}) for row in rows))
    settings = CalibrationSettings(str(path), segments=9)
    apart = calibration_tokens(settings, tokenizer, 20, cache)
    packed = calibration_tokens(replace(settings, pack=True), tokenizer, 20, cache)
    assert not torch.equal(apart, packed)


def test_few_tokens_are_warned_of_with_the_number_that_is_enough() -> None:
    words = few_tokens(segments=3, length=100, inputs=64)
    assert words is not None
    assert words.startswith("300 calibration tokens are few for projections with up to 64 inputs")
    assert words.endswith("Raise data.calibration.segments to 7")
    assert few_tokens(segments=7, length=100, inputs=64) is None


def test_a_changed_length_is_never_served_from_an_old_cache(
    settings: CalibrationSettings, tokenizer: PreTrainedTokenizerFast, cache: Path
) -> None:
    for length in [20, 21]:
        assert calibration_tokens(settings, tokenizer, length, cache).shape == (12, length)
        assert evaluation_tokens(str(settings.source), tokenizer, length, 5, cache).shape == (5, length)


def test_a_changed_text_is_never_served_from_an_old_cache(
    file: Path, tokenizer: PreTrainedTokenizerFast, cache: Path
) -> None:
    evaluation_tokens(str(file), tokenizer, 10, 1, cache)
    file.write_text(text_of(range(2, 40)))
    found = evaluation_tokens(str(file), tokenizer, 10, 1, cache)
    assert found.flatten().tolist() == list(range(2, 12))


def test_another_tokenizer_is_never_served_from_an_old_cache(
    file: Path, tokenizer_factory: Callable[..., PreTrainedTokenizerFast], cache: Path
) -> None:
    evaluation_tokens(str(file), tokenizer_factory(), 10, 1, cache)
    small = evaluation_tokens(str(file), tokenizer_factory(words=5), 10, 1, cache)
    assert small.flatten().tolist() == [1, 2, 3, 4, 0, 0, 0, 0, 0, 0]
    bos = evaluation_tokens(str(file), tokenizer_factory(bos=True), 10, 1, cache)
    assert bos[0, 0] == 1000


def test_truncation_of_an_earlier_call_changes_neither_identity_nor_tokens(
    file: Path, tokenizer: PreTrainedTokenizerFast, cache: Path
) -> None:
    before = tokens.tokenizer_identity(tokenizer)
    tokenizer("w1 w2 w3", truncation=True, max_length=2)
    assert '"truncation":{' in tokenizer.backend_tokenizer.to_str()
    assert tokens.tokenizer_identity(tokenizer) == before
    assert evaluation_tokens(str(file), tokenizer, 40, None, cache).shape == (22, 40)


def test_a_tokenizer_written_in_python_works_too(file: Path, cache: Path) -> None:
    tokenizer = ByT5Tokenizer()
    assert not tokenizer.is_fast
    found = evaluation_tokens(str(file), tokenizer, 5, 1, cache)
    assert found.flatten().tolist() == [byte + 3 for byte in b"w1 w2"]  # ByT5: 3 special tokens
    identity = tokens.tokenizer_identity(tokenizer)
    assert identity == tokens.tokenizer_identity(ByT5Tokenizer())
    assert identity != tokens.tokenizer_identity(ByT5Tokenizer(extra_ids=3))


def test_tokens_outside_of_the_vocabulary_are_refused() -> None:
    ids = torch.tensor([[1, 2], [9, 0]])
    check_vocabulary(ids, 10)
    with pytest.raises(UserError, match=r"token id 9, but the model's vocabulary has 9 entries"):
        check_vocabulary(ids, 9)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.int32])
def test_stored_ids_may_be_of_any_integer_type(
    tokenizer: PreTrainedTokenizerFast, cache: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    ids = torch.arange(20).view(2, 10)
    save_file({"tokens": ids.to(dtype)}, tmp_path / "ids.safetensors")
    settings = CalibrationSettings(str(tmp_path / "ids.safetensors"), segments=2)
    assert torch.equal(calibration_tokens(settings, tokenizer, 10, cache), ids)


def test_a_text_of_ids_may_have_fewer_segments_than_are_measured_at_most(
    tokenizer: PreTrainedTokenizerFast, cache: Path, tmp_path: Path
) -> None:
    file, ids = tmp_path / "ids.safetensors", torch.arange(20).view(2, 10)
    save_file({"tokens": ids}, file)
    assert torch.equal(evaluation_tokens(str(file), tokenizer, 10, 40, cache), ids)
    with pytest.raises(UserError, match="has 2 segments: set the number of segments to 2 or less"):
        calibration_tokens(CalibrationSettings(str(file), segments=3), tokenizer, 10, cache)
