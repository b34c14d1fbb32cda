"""Make a tokenizer whose ids can be read off the text, and a hub without network."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast


def make_tokenizer(words: int = 1000, *, bos: bool = False) -> PreTrainedTokenizerFast:
    """The word ``w7`` is token 7; ``<unk>`` is 0; with ``bos``, ``<s>`` is the last and comes first."""
    vocabulary = {"<unk>": 0} | {f"w{i}": i for i in range(1, words)} | {"<s>": words}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", words)]
        )
    # a text longer than 8 tokens would be warned about
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", model_max_length=8)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def tokenizer_factory() -> Callable[..., PreTrainedTokenizerFast]:
    return make_tokenizer


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


class FakeHub:
    """Stands in for ``datasets.load_dataset`` and remembers what it was asked for."""

    signature = inspect.signature(datasets.load_dataset)

    def __init__(self) -> None:
        self.rows: dict[str, list[str]] = {}
        self.error: Exception | None = None
        self.calls: list[dict[str, Any]] = []

    def __call__(self, *args: Any, **options: Any) -> datasets.Dataset:
        asked = self.signature.bind(*args, **options).arguments
        self.calls.append({name: value for name, value in asked.items() if value is not None})
        if self.error is not None:
            raise self.error
        return datasets.Dataset.from_dict(self.rows)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub()
    monkeypatch.setattr(datasets, "load_dataset", fake)
    return fake
