"""Calibration segments come from several texts, and from conversations."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast

from aespa_pl.data.tokens import calibration_tokens
from aespa_pl.errors import UserError
from aespa_pl.settings import CalibrationSettings


def text_of(ids: range) -> str:
    return " ".join(f"w{i}" for i in ids)


def test_segments_of_several_texts_are_mixed_in_their_proportions(
    tokenizer: PreTrainedTokenizerFast, cache: Path, tmp_path: Path
) -> None:
    """Words up to 450 are of one text, those above of the other."""
    names = [str(tmp_path / name) for name in ("low.txt", "high.txt")]
    for name, words in zip(names, [range(1, 451), range(451, 901)], strict=True):
        Path(name).write_text(text_of(words))
    settings = CalibrationSettings(source=dict(zip(names, [3, 1], strict=True)), segments=16)
    found = calibration_tokens(settings, tokenizer, 20, cache)
    of_low = [bool((segment <= 450).all()) for segment in found]
    assert sum(of_low) == 12
    assert not any(of_low[i] and bool((found[i] > 450).any()) for i in range(16))
    assert 0 < sum(of_low[:8]) < 8 or 0 < sum(of_low[8:]) < 8  # in no order of texts
    assert calibration_tokens(settings, tokenizer, 20, cache).equal(found)
    other = replace(settings, source=dict(zip(names, [1, 3], strict=True)))
    assert sum(bool((s <= 450).all()) for s in calibration_tokens(other, tokenizer, 20, cache)) == 4


@pytest.mark.parametrize("ending", ["txt", "safetensors"])
def test_two_texts_with_the_same_content_are_refused(
    tokenizer: PreTrainedTokenizerFast, cache: Path, tmp_path: Path, ending: str
) -> None:
    """Each segment would be drawn from both, and a tuning would train on what it holds back."""
    names = [str(tmp_path / f"{name}.{ending}") for name in ("first", "second")]
    for name in names:
        if ending == "txt":
            Path(name).write_text(text_of(range(1, 451)))
        else:
            save_file({"tokens": torch.arange(320).view(16, 20)}, name)
    settings = CalibrationSettings(source=dict.fromkeys(names, 1.0), segments=16)
    with pytest.raises(UserError, match=r"first.* and .*second.* have the same content, .*leave one of them"):
        calibration_tokens(settings, tokenizer, 20, cache)


def test_a_missing_file_of_token_ids_among_several_is_refused(
    tokenizer: PreTrainedTokenizerFast, cache: Path, tmp_path: Path
) -> None:
    settings = CalibrationSettings({"embedded": 1.0, str(tmp_path / "no.safetensors"): 1.0}, segments=2)
    with pytest.raises(UserError, match=r"no\.safetensors can't be read"):
        calibration_tokens(settings, tokenizer, 5, cache)


def write_conversations(path: Path) -> CalibrationSettings:
    """The conversations differ in what no template of the tests takes."""
    rows = []
    for i in range(9):
        turns = [{"role": "user", "content": "w1 w2", "id": i}, {"role": "assistant", "content": "w3 w4 w5"}]
        rows.append(json.dumps({"prompt": "w9", "messages": turns}))
    path.write_text("\n".join(rows))
    return CalibrationSettings(str(path), segments=3)


@pytest.mark.parametrize(
    "date",
    ["date_string if date_string is defined else strftime_now('%d %b %Y')", "strftime_now('%d %b %Y')"],
    ids=["llama", "others"],
)
def test_conversations_go_through_the_chat_template_without_other_special_tokens(
    tokenizer_factory: Callable[..., PreTrainedTokenizerFast], cache: Path, tmp_path: Path, date: str
) -> None:
    settings = write_conversations(tmp_path / "chat.jsonl")
    tokenizer = tokenizer_factory(bos=True)  # would add <s>, which the template writes itself
    tokenizer.chat_template = (
        "{% for m in messages %}w{{ 100 if m.role == 'user' else 200 }} {{ m.content }} {% endfor %}"
        f"w{{{{ ({date})[-2:] }}}}"
    )
    whole = [100, 1, 2, 200, 3, 4, 5, 24]  # the year is never today's
    for segment in calibration_tokens(settings, tokenizer, 6, cache).tolist():
        assert segment in [whole[i : i + 6] for i in range(3)]
    tokenizer.chat_template = "w300 w301 w302 w303 w304 w305 w306"
    found = calibration_tokens(settings, tokenizer, 6, cache)
    assert found.min() >= 300  # another template is never served from an old cache


def test_a_template_that_reads_parts_alone_gets_parts(
    tokenizer: PreTrainedTokenizerFast, cache: Path, tmp_path: Path
) -> None:
    """Those of some multimodal models leave a content out that is a text, without a word."""
    row = {"messages": [{"role": "user", "content": "w1 w2 w3 w4 w5 w6 w7"}]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(row))
    part = "{% if p.type == 'text' %}{{ p.text }}{% endif %}"
    tokenizer.chat_template = f"{{% for p in messages[0].content %}}{part}{{% endfor %}}"
    settings = CalibrationSettings(str(tmp_path / "chat.jsonl"), segments=1)
    assert calibration_tokens(settings, tokenizer, 6, cache).tolist()[0] in ([*range(1, 7)], [*range(2, 8)])


def test_tools_reach_the_chat_template(
    tokenizer: PreTrainedTokenizerFast, cache: Path, tmp_path: Path
) -> None:
    tools = [{"name": f"w{i}"} for i in range(30, 36)]
    row = {"messages": [{"role": "user", "content": "w1"}], "tools": tools}
    (tmp_path / "chat.jsonl").write_text(json.dumps(row))
    tokenizer.chat_template = "{% for t in tools %}{{ t.name }} {% endfor %}{{ messages[0].content }}"
    settings = CalibrationSettings(str(tmp_path / "chat.jsonl"), segments=1)
    whole = [*range(30, 36), 1]
    assert calibration_tokens(settings, tokenizer, 6, cache).tolist()[0] in (whole[:6], whole[1:])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, r"has no chat template: give rows with 'text', or choose an instruct model"),
        ("{{ raise_exception('roles must alternate') }}", r"\(roles must alternate\): remove such"),
        ("{% for %}", "the model's chat template refuses a conversation"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "refuses a conversation"),
    ],
)
def test_conversations_that_no_template_takes_are_refused(
    tokenizer: PreTrainedTokenizerFast, cache: Path, tmp_path: Path, template: str | None, message: str
) -> None:
    settings = write_conversations(tmp_path / "chat.jsonl")
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=message):
        calibration_tokens(settings, tokenizer, 6, cache)


def test_seeds_draw_other_segments_of_stored_token_ids(
    tokenizer: PreTrainedTokenizerFast, cache: Path, tmp_path: Path
) -> None:
    file, ids = tmp_path / "ids.safetensors", torch.arange(160).view(16, 10)
    save_file({"tokens": ids}, file)
    settings = [CalibrationSettings(str(file), segments=4, seed=seed) for seed in (0, 1, 2, 1)]
    found = [calibration_tokens(each, tokenizer, 10, cache).tolist() for each in settings]
    assert found[0] == ids[:4].tolist()
    assert found[1] == found[3]
    assert len({str(sorted(rows)) for rows in found}) == 3
    for rows in found:
        assert len({str(row) for row in rows}) == 4
        assert all(row in ids.tolist() for row in rows)
