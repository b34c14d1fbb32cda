"""Perplexity is the exponential of the library model's own cross entropy."""

import math
import re
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from aespa_pl.errors import UserError
from aespa_pl.evaluation.perplexity import divergence, perplexity, refuse_diverged, whole_perplexity
from aespa_pl.models import family_of
from aespa_pl.models.streamed import StreamedModel
from tests.models.examples import VOCABULARY, make_ids, make_model, save
from tests.models.test_streamed import make, open_stream

SEGMENTS = 5
CLOSE = 1e-4
"""Relative tolerance: logits are float32, and the largest perplexities here are exp(20)."""


def token_losses(model: PreTrainedModel, ids: Tensor) -> list[float]:
    """Return -log p of each token but the first of a segment, one by one."""
    losses = []
    for segment in ids:
        logits = model(segment[None], use_cache=False).logits[0].double()
        for position in range(1, len(segment)):
            odds = [math.exp(float(x)) for x in logits[position - 1] - logits[position - 1].max()]
            losses.append(-math.log(odds[segment[position]] / sum(odds)))
    return losses


def by_hand(model: PreTrainedModel, ids: Tensor) -> float:
    losses = token_losses(model, ids)
    return math.exp(sum(losses) / len(losses))


@pytest.mark.parametrize("name", ["opt-350m", "bloom", "granite", "gemma2", "gpt-oss"])
def test_perplexity_is_that_of_the_librarys_model(name: str, tmp_path: Path) -> None:
    model, source = make(name, tmp_path)
    ids = make_ids(SEGMENTS)
    found = perplexity(source, {"text": ids}, batch_size=2)
    assert found == {"text": pytest.approx(by_hand(model, ids), rel=CLOSE)}
    loss = float(model(ids, labels=ids, use_cache=False).loss)  # the library's own
    assert found["text"] == pytest.approx(math.exp(loss), rel=CLOSE)


@pytest.mark.parametrize("name", ["opt", "bloom", "llama"])
def test_batch_size_is_of_no_matter(name: str, tmp_path: Path) -> None:
    """The last batch is smaller; a mean over batches would weigh its tokens more."""
    model, source = make(name, tmp_path)
    ids = make_ids(SEGMENTS)
    ids[-1] = ids[-1, 0]  # so that its loss is another
    expected = by_hand(model, ids)
    assert by_hand(model, ids[-1:]) != pytest.approx(expected, rel=0.1)
    for batch_size in (1, 2, 3, SEGMENTS, 100):
        found = perplexity(source, {"text": ids}, batch_size=batch_size)
        assert found["text"] == pytest.approx(expected, rel=CLOSE)


def test_texts_of_different_lengths_are_measured_on_their_own(tmp_path: Path) -> None:
    model, source = make("llama-grouped", tmp_path)
    texts = {
        "long": make_ids(SEGMENTS),
        "short": torch.randint(0, VOCABULARY, (3, 4)),
        "pair": torch.randint(0, VOCABULARY, (1, 2)),
    }
    found = perplexity(source, texts, batch_size=2)
    assert list(found) == list(texts)
    for name, ids in texts.items():
        assert found[name] == pytest.approx(by_hand(model, ids), rel=CLOSE)
    assert len({round(value, 3) for value in found.values()}) == 3


def test_hidden_states_of_one_text_are_in_memory_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make("opt", tmp_path)[1]
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = [0]
    run_block = StreamedModel.run_block

    def observed(self: StreamedModel, block: nn.Module, hidden: Tensor) -> Tensor:
        output = run_block(self, block, hidden)
        alive.add(output)
        most[0] = max(most[0], len(alive))
        return output

    monkeypatch.setattr(StreamedModel, "run_block", observed)
    perplexity(source, {name: make_ids(4) for name in "abcde"}, batch_size=1)
    assert most[0] <= 2 * 4  # before and after a block, of one text


def test_no_texts_give_no_numbers(tmp_path: Path) -> None:
    assert perplexity(make("opt", tmp_path)[1], {}, batch_size=2) == {}


def halve(_: int, block: nn.Module) -> None:
    for parameter in block.parameters():
        parameter.detach().mul_(0.5)


@pytest.mark.parametrize("name", ["opt", "bloom", "llama"])
def test_change_is_applied_once_to_each_block(name: str, tmp_path: Path) -> None:
    model, source = make(name, tmp_path)
    ids = make_ids(SEGMENTS)
    texts = {"a": ids, "b": ids[:2]}
    original = perplexity(source, texts, batch_size=2)
    changed = perplexity(source, texts, batch_size=2, change=halve)
    again = perplexity(source, texts, batch_size=2)
    blocks = model.get_submodule(family_of(model.config).blocks_path)
    for index, block in enumerate(blocks):
        halve(index, block)
    for text, tokens in texts.items():
        assert changed[text] == pytest.approx(by_hand(model, tokens), rel=CLOSE)
        assert changed[text] != pytest.approx(original[text], rel=10 * CLOSE)
    assert again == original


def set_head(factor: float) -> Callable[[PreTrainedModel], None]:
    def change(model: PreTrainedModel) -> None:
        model.get_output_embeddings().weight.mul_(factor)

    return change


def test_a_model_that_knows_nothing_has_the_vocabulary_as_perplexity(tmp_path: Path) -> None:
    model = make_model("llama", torch.float32)
    set_head(0.0)(model)
    source = open_stream(save(model, tmp_path))
    found = perplexity(source, {"text": make_ids(SEGMENTS)}, batch_size=2)
    assert found["text"] == pytest.approx(VOCABULARY, rel=1e-6)


@pytest.mark.parametrize("factor", [1e4, 5e37])  # too large a loss, and infinite logits
def test_a_perplexity_that_is_no_number_is_infinity(tmp_path: Path, factor: float) -> None:
    model = make_model("llama", torch.float32)
    set_head(factor)(model)
    source = open_stream(save(model, tmp_path))
    found = perplexity(source, {"text": make_ids(2)}, batch_size=2)
    assert found == {"text": math.inf}
    assert whole_perplexity(model, make_ids(2)) == math.inf


@pytest.mark.parametrize(
    ("dtype", "advice"), [(torch.float32, "more bits"), (torch.float16, "try --model.dtype float32")]
)
def test_a_perplexity_that_is_no_number_is_refused_by_the_texts_name(dtype: torch.dtype, advice: str) -> None:
    message = f"of the quantized model on b is not a finite number in {dtype}: {advice}"
    with pytest.raises(UserError, match=re.escape(message)):
        refuse_diverged({"a": 3.0, "b": math.inf}, "the quantized model", dtype, "more bits")
    refuse_diverged({"a": 3.0}, "the quantized model", dtype, "more bits")


def test_many_tokens_do_not_lose_digits(tmp_path: Path) -> None:
    """The mean is taken in float64: float32 loses 1e-5 over a few thousand tokens."""
    model, source = make("opt", tmp_path)
    ids = make_ids(400)
    logits = model(ids, use_cache=False).logits[:, :-1].double()
    chosen = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])
    expected = float(torch.exp(-chosen.mean()))
    found = perplexity(source, {"text": ids}, batch_size=100)["text"]
    assert found == pytest.approx(expected, rel=2e-6)


def test_half_precision_is_measured_in_its_own_type(tmp_path: Path) -> None:
    """bfloat16 keeps 8 bits: logits of a size of 5 are 0.02 off."""
    model = make_model("opt", torch.bfloat16)
    source = open_stream(save(model, tmp_path), torch.bfloat16)
    ids = make_ids(SEGMENTS)
    found = perplexity(source, {"text": ids}, batch_size=2)["text"]
    assert found == pytest.approx(by_hand(model, ids), rel=0.02)
    assert found != pytest.approx(by_hand(model.float(), ids), rel=CLOSE)


def test_positions_of_a_segment_are_measured_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of a whole segment may take more memory than all else."""
    save(make_model("opt"), tmp_path)
    texts, found = {"a": make_ids(3)}, []
    for positions in (256, 3):
        monkeypatch.setattr("aespa_pl.models.streamed.POSITIONS", positions)
        one, other = (open_stream(tmp_path) for _ in range(2))
        found.append(perplexity(one, texts, batch_size=2)["a"])
        assert divergence(one, other, texts, batch_size=2)["a"].same_top == 1
    assert found[0] == pytest.approx(found[1], rel=1e-6)
