"""What a test measures later is added to a run's own numbers, and never mixes two protocols."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from aespa_pl.commands.output import store
from aespa_pl.evaluation.table import rules_of, with_others
from aespa_pl.settings import TaskSettings

FITTED: dict[str, Any] = {
    "perplexity": {"original": {"a": 10.0, "b": 20.0}, "quantized": {"a": 12.0, "b": 22.0}},
    "seconds": {"quantization": 4.0},
    "tokens": {"a": "(40, 512) 1", "b": "(40, 512) 2"},
}


def test_a_text_that_the_run_lacks_is_added() -> None:
    later = {
        "perplexity": {"original": {"c": 9.0}, "quantized": {"c": 9.5}},
        "tokens": {"c": "(4, 512) 3"},
        "size": {"nearest": {"bytes": 8}},
    }
    assert with_others(FITTED, later) == {
        "perplexity": {
            "original": {"a": 10.0, "b": 20.0, "c": 9.0},
            "quantized": {"a": 12.0, "b": 22.0, "c": 9.5},
        },
        "seconds": {"quantization": 4.0},
        "tokens": {**FITTED["tokens"], "c": "(4, 512) 3"},
        "size": {"nearest": {"bytes": 8}},
    }


def test_of_a_text_with_other_tokens_the_first_numbers_alone_stay() -> None:
    kinds = {"original": {"a": 11.0}, "nearest": {"a": 41.0}, "quantized": {"a": 13.0}}
    later = {"perplexity": kinds, "divergence": {"quantized": {"a": {"mean": 0.1}}}}
    for tokens in ({"tokens": {"a": "(4, 512) 1"}}, {}):  # {}: a file of an older version
        assert with_others(FITTED, later | tokens) == FITTED
    assert with_others(later, FITTED)["perplexity"] == {
        "original": {"a": 11.0, "b": 20.0},
        "nearest": {"a": 41.0},
        "quantized": {"a": 13.0, "b": 22.0},
    }


def test_of_a_text_with_the_same_tokens_what_lacks_is_added() -> None:
    kinds = {"original": {"a": 10.00000001}, "nearest": {"a": 40.0}, "quantized": {"a": 12.5}}
    later = {"perplexity": kinds, "tokens": {"a": "(40, 512) 1"}}
    assert with_others(FITTED, later) == {
        **FITTED,
        "perplexity": {**FITTED["perplexity"], "nearest": {"a": 40.0}},
    }


def test_tasks_are_joined_by_name() -> None:
    first = {"tasks": {"quantized": {"piqa": {"value": 0.5}}}}
    others = {"tasks": {"quantized": {"piqa": {"value": 0.6}, "mine": {"value": 0.7}}}}
    assert with_others(first, others) == {
        "tasks": {"quantized": {"piqa": {"value": 0.5}, "mine": {"value": 0.7}}}
    }


def test_nothing_measured_stays_nothing() -> None:
    assert with_others({}, {}) == {}
    assert with_others({}, {"tasks": {}}) == {}
    assert with_others(FITTED, {}) == with_others({}, FITTED) == FITTED


def test_a_later_test_on_other_tokens_says_what_it_drops(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    distance = {"mean": 0.1, "rare": 1.0, "same_top": 0.9}
    first = {
        "perplexity": {"quantized": {"a": 13.0, "b": 14.0}},
        "divergence": {"quantized": {"a": distance}},
        "tokens": {"a": "(16, 64) 1", "b": "(4, 64) 2"},
    }
    again = {
        "perplexity": {"quantized": {"a": 12.0, "b": 14.0}},
        "tokens": {"a": "(4, 64) 3", "b": "(4, 64) 2"},
    }
    with caplog.at_level(logging.WARNING):
        store(tmp_path, first, "rtn")
        assert caplog.messages == []
        store(tmp_path, again, "rtn")
    assert caplog.messages == [
        "test.json had a on other tokens (16 segments of 64 tokens): no perplexity or KL divergence of these "
        "is kept"
    ]


def test_accuracies_by_other_rules_do_not_stand_in_one_table(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def tested(items: int, examples: int, *kinds: str) -> dict[str, Any]:
        score = {"metric": "acc", "value": 0.5, "error": 0.1, "items": items}
        scores = {kind: {"arc": score} for kind in kinds}
        return {"tasks": scores, "tokens": rules_of({"arc": score}, TaskSettings(task_examples=examples))}

    def kinds() -> list[str]:
        return [*json.loads((tmp_path / "test.json").read_text())["tasks"]]

    store(tmp_path, tested(100, 0, "original", "nearest", "quantized"), "rtn")
    store(tmp_path, tested(100, 0, "quantized"), "rtn")
    assert caplog.messages == []
    assert [*json.loads((tmp_path / "test.json").read_text())["tasks"]] == [
        "original",
        "nearest",
        "quantized",
    ]
    for number, (items, examples) in enumerate(((200, 0), (200, 5)), 1):
        store(tmp_path, tested(items, examples, "original", "quantized"), "rtn")
        assert len(caplog.messages) == number
        assert kinds() == ["original", "quantized"]
    assert caplog.messages[0] == (
        "test.json had arc by other rules (100 items, 0 examples, seed 0): no accuracy of these is kept"
    )
