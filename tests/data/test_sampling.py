"""Calibration segments are windows of long documents, each checked against the words of the text."""

from collections import Counter
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from aespa_pl.data import sampling
from aespa_pl.data.sampling import divide_segments, draw_segments
from aespa_pl.errors import UserError
from aespa_pl.settings import CalibrationSettings

LENGTH = 16


class Words:
    """Remembers the texts that it was asked for; the word 7 is token 7."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, document: Any) -> Tensor:
        self.asked.append(document)
        return torch.tensor([int(word) for word in document.split()], dtype=torch.int64)


def make_documents(lengths: list[int]) -> list[str]:
    """Words never repeat, in a document or between documents: a window tells where it is from."""
    first, documents = 0, []
    for length in lengths:
        documents.append(" ".join(str(i) for i in range(first, first + length)))
        first += length
    return documents


def draw(documents: list[str], segments: int, seed: int = 0, *, pack: bool = False) -> list[list[int]]:
    settings = CalibrationSettings(source="a.txt", segments=segments, seed=seed, pack=pack)
    tokens = draw_segments(documents, Words(), settings, LENGTH)
    assert tokens.dtype == torch.int64
    assert tokens.shape == (segments, LENGTH)
    return tokens.tolist()


def origin(segment: list[int], documents: list[str]) -> int:
    """Return the one document that the segment is a contiguous piece of."""
    piece = f" {' '.join(map(str, segment))} "
    (index,) = [i for i, document in enumerate(documents) if piece in f" {document} "]
    return index


def test_segments_are_divided_by_proportions_and_add_up() -> None:
    assert divide_segments({"a": 0.7, "b": 0.3}, 10) == {"a": 7, "b": 3}
    with pytest.raises(UserError, match="names no text"):
        divide_segments({}, 10)
    assert divide_segments({"a": 2, "b": 1}, 128) == {"a": 85, "b": 43}  # 85.33, 42.67
    assert divide_segments({"a": 1, "b": 1, "c": 1}, 3) == {"a": 1, "b": 1, "c": 1}
    for segments in range(7, 60):
        counts = divide_segments({"a": 1, "b": 2.5, "c": 0.9}, segments)
        assert sum(counts.values()) == segments
        assert all(
            abs(counts[name] - segments * p / 4.4) < 1 for name, p in [("a", 1), ("b", 2.5), ("c", 0.9)]
        )
    with pytest.raises(
        UserError, match=r"segments are too few \(10\), and b would have none: raise its proportion"
    ):
        divide_segments({"a": 1, "b": 0.01}, 10)


def test_every_segment_is_a_window_of_a_document_longer_than_itself() -> None:
    random = Random(1)
    documents = make_documents([random.randint(0, 4 * LENGTH) for _ in range(300)])
    origins = [origin(segment, documents) for segment in draw(documents, 40)]
    assert len(set(origins)) == 40  # enough long documents: each is used once
    assert all(len(documents[i].split()) > LENGTH for i in origins)


def test_documents_are_chosen_at_random_from_the_whole_text() -> None:
    documents = make_documents([2 * LENGTH] * 500)
    chosen = [{origin(s, documents) for s in draw(documents, 20, seed)} for seed in range(2)]
    for origins in chosen:
        assert min(origins) < 150
        assert max(origins) > 350
    assert len(chosen[0] & chosen[1]) < 10


def test_a_document_as_long_as_a_segment_is_skipped() -> None:
    documents = make_documents([LENGTH, LENGTH + 1])
    assert origin(draw(documents, 1)[0], documents) == 1


def test_one_document_gives_windows_anywhere_in_it() -> None:
    documents = make_documents([LENGTH * 100])
    starts = [segment[0] for segment in draw(documents, 100)]
    assert all(segment == list(range(segment[0], segment[0] + LENGTH)) for segment in draw(documents, 100))
    assert min(starts) < 10 * LENGTH
    assert max(starts) > 90 * LENGTH
    assert len(set(starts)) > 80


def test_first_and_last_window_of_a_document_can_be_drawn() -> None:
    documents = make_documents([LENGTH + 1])
    assert {draw(documents, 1, seed)[0][0] for seed in range(30)} == {0, 1}


def test_few_long_documents_are_all_used_and_the_longer_ones_more_often() -> None:
    documents = make_documents([LENGTH + 1, 100 * LENGTH, 3, LENGTH + 1])
    origins = [origin(segment, documents) for segment in draw(documents, 50)]
    assert {0, 1, 3} == set(origins)
    assert origins.count(1) > 40


@pytest.mark.parametrize(
    ("lengths", "segments"),
    [([150 * LENGTH], 128), ([10 * LENGTH + 3], 10), ([40 * LENGTH, 2 * LENGTH, 7 * LENGTH - 1], 40)],
)
def test_no_token_is_in_two_segments_so_none_held_back_is_trained_on(
    lengths: list[int], segments: int
) -> None:
    """Whichever segments are held back: words are unique, so a token in two segments shows."""
    documents = make_documents(lengths)
    for seed in range(20):
        drawn = draw(documents, segments, seed)
        assert len({word for segment in drawn for word in segment}) == segments * LENGTH
        assert all(origin(segment, documents) in range(len(lengths)) for segment in drawn)


def test_windows_that_happen_not_to_overlap_are_those_of_optq() -> None:
    """Drawn apart from each other only where needed: a random start for each window."""
    documents = make_documents([1000 * LENGTH])
    random = Random(0)
    random.sample([0], 1)
    random.choices([0], [1], k=4)
    starts = [random.randint(0, 999 * LENGTH) for _ in range(5)]
    assert [segment[0] for segment in draw(documents, 5)] == starts


def test_every_way_to_place_two_windows_apart_is_equally_likely() -> None:
    """3 tokens to spare give 10 ways; an overlapping first draw is likely, and then one of them is taken."""
    lengths, ways = [2 * LENGTH + 3], Counter[tuple[int, ...]]()
    for seed in range(4000):
        placed = sampling._place_apart(lengths, 2, LENGTH, Random(seed))
        ways[tuple(sorted(start for _, start in placed))] += 1
    assert set(ways) == {(a, b + LENGTH) for a in range(4) for b in range(a, 4)}
    assert min(ways.values()) > 300


def test_segments_that_are_held_back_come_from_anywhere_in_the_text() -> None:
    documents = make_documents([150 * LENGTH])
    last = [word for segment in draw(documents, 128)[-8:] for word in segment]
    assert min(last) < 50 * LENGTH
    assert max(last) > 100 * LENGTH


def test_the_same_seed_draws_the_same_and_another_does_not() -> None:
    documents = make_documents([3 * LENGTH] * 50)
    assert draw(documents, 20, seed=3) == draw(documents, 20, seed=3)
    assert draw(documents, 20, seed=3) != draw(documents, 20, seed=4)


def test_the_choice_does_not_depend_on_the_global_generators() -> None:
    documents = make_documents([3 * LENGTH] * 50)
    first = draw(documents, 20)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert draw(documents, 20) == first
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("pack", [False, True])
def test_a_document_that_is_there_several_times_is_used_once(*, pack: bool) -> None:
    documents = make_documents([2 * LENGTH + 5] * 4 + [LENGTH // 2] * 6)
    for seed in range(20):
        drawn = draw(documents * 3, 8, seed, pack=pack)
        assert len({word for segment in drawn for word in segment}) == 8 * LENGTH


def test_documents_that_are_not_drawn_are_not_tokenized() -> None:
    words = Words()
    documents = make_documents([2 * LENGTH] * 1000)
    draw_segments(documents, words, CalibrationSettings(segments=10), LENGTH)
    assert len(words.asked) == 10


def test_too_short_documents_are_refused_with_the_numbers() -> None:
    with pytest.raises(UserError) as caught:
        draw(make_documents([5, LENGTH, 7]), 2)
    assert str(caught.value) == (
        "data.calibration.source: a.txt has no document of more than 16 tokens (documents read: 3, "
        "the longest has 16 tokens); join shorter documents with data.calibration.pack true, choose a "
        "shorter data.calibration.segment_length, or another text (a .txt is one document)"
    )


def test_no_document_at_all_is_refused() -> None:
    with pytest.raises(UserError, match="documents read: 0"):
        draw([], 1)


def test_fewer_tokens_than_asked_for_are_refused_with_the_numbers() -> None:
    with pytest.raises(UserError) as caught:
        draw(make_documents([LENGTH, 3 * LENGTH + 1, 2 * LENGTH]), 6)
    assert str(caught.value) == (
        "data.calibration.source: a.txt is too short: its documents of more than 16 tokens have room for "
        "5 segments that don't overlap, of 6 to be drawn; set data.calibration.segments (or this text's "
        "part of them) to 5 at most, join shorter documents with data.calibration.pack true, choose a "
        "shorter data.calibration.segment_length, or another text"
    )
    with pytest.raises(UserError, match="room for 5") as caught:  # no document is left out
        draw(make_documents([5 * LENGTH]), 6)
    assert "pack" not in str(caught.value)
    assert len(draw(make_documents([LENGTH, 3 * LENGTH + 1, 2 * LENGTH]), 5)) == 5  # not one to spare


def test_a_text_of_short_documents_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "PATIENCE", 20)
    words = Words()
    with pytest.raises(UserError, match="documents read: 20"):
        draw_segments(make_documents([2] * 1000), words, CalibrationSettings(segments=1), LENGTH)
    assert len(words.asked) == 20


def test_short_documents_between_long_ones_do_not_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "PATIENCE", 60)
    documents = make_documents([5, 5, 2 * LENGTH] * 100)
    assert len({origin(segment, documents) for segment in draw(documents, 100)}) == 100


def test_packing_joins_whole_short_documents_until_they_are_long_enough() -> None:
    """Five documents of 5 tokens make a window of 16; a word in a window tells whose it is."""
    documents = make_documents([5] * 30)
    owner = {int(word): i for i, document in enumerate(documents) for word in document.split()}
    segments = draw(documents, 4, pack=True)
    used = [{owner[word] for word in segment} for segment in segments]
    assert all(not a & b for i, a in enumerate(used) for b in used[:i])
    for segment in segments:
        assert len(set(segment)) == LENGTH
        for index in {owner[word] for word in segment[1:-1]}:
            words = [word for word in segment if owner[word] == index]
            assert words == list(range(words[0], words[0] + len(words)))  # in their own order
        inner = {owner[w] for w in segment} - {owner[segment[0]], owner[segment[-1]]}
        assert all(sum(owner[w] == i for w in segment) == 5 for i in inner)  # and whole
    assert segments != draw(documents, 4, seed=1, pack=True)


def test_packing_leaves_long_documents_alone() -> None:
    documents = make_documents([2 * LENGTH] * 20)
    assert draw(documents, 10, pack=True) == draw(documents, 10)
    mixed = make_documents([3, 2 * LENGTH] * 20)
    whole = [{int(word) for word in document.split()} for document in mixed[1::2]]
    found = [set(segment) for segment in draw(mixed, 20, pack=True)]
    assert sum(any(f <= w for w in whole) for f in found) >= 17  # 60 short tokens make 3 at most


def test_too_few_tokens_are_refused_though_they_are_packed() -> None:
    with pytest.raises(
        UserError, match=r"no more than 16 tokens .*16 tokens together\); choose a shorter"
    ) as caught:
        draw(make_documents([4] * 4), 1, pack=True)
    assert "pack" not in str(caught.value)
