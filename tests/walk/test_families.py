"""Blocks of every structure go through a walk; 8 bits reproduce the logits."""

from pathlib import Path

import pytest

from tests.walks import walk

STRUCTURES = [
    "granite", "smollm3", "ministral3", "phi3", "gemma2", "gemma3", "olmo3", "exaone4", "seed-oss",
    "glm", "glm4", "ernie4.5", "hunyuan", "lfm2", "glm4-moe", "ernie4.5-moe", "hunyuan-moe", "lfm2-moe",
    "granite4", "granite4-dense", "granite4-moe", "gemma4", "gemma4-full", "gemma4-moe",
    "gemma4-small", "granite-moe", "olmoe", "minimax", "glm4-flash", "deepseek-v2", "deepseek-v3",
]  # fmt: skip


@pytest.mark.parametrize("name", STRUCTURES)
def test_eight_bits_reproduce_the_logits(name: str, tmp_path: Path) -> None:
    """The change is some 2 ** -6 of the logits' own variation, as the roundings add up."""
    quantized = walk(name, tmp_path, {"method": "aespa-fast", "bits": 8})
    before, after = (
        model(quantized.ids, use_cache=False).logits for model in (quantized.original, quantized.exported())
    )
    assert float((after - before).std()) < 0.03 * float(before.std())
