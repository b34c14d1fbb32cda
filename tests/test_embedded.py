"""The small models that come with the package."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from aespa_pl.commands.evaluate import evaluate
from aespa_pl.data.texts import EMBEDDED
from tests.jobs import embedded, prepared

FAMILIES = ["opt", "bloom", "llama"]


@pytest.mark.parametrize("family", FAMILIES)
def test_embedded_model_is_trained_and_two_bits_hurt(family: str, tmp_path: Path) -> None:
    job = prepared(embedded(family, length=256, cache=tmp_path, max_segments=40))
    texts = job.evaluation()
    original = evaluate(job, job.pretrained, texts)["embedded"]
    nearest = evaluate(job, job.pretrained, texts, nearest=True)["embedded"]
    assert original < 50  # of a vocabulary of 1,024
    assert nearest > 1.7 * original


def test_embedded_models_differ_in_kind() -> None:
    layouts = {family: prepared(embedded(family)) for family in FAMILIES}
    kinds = {name: job.pretrained.config.model_type for name, job in layouts.items()}
    assert kinds == {name: name for name in FAMILIES}
    llama = layouts["llama"].family.layout(layouts["llama"].pretrained.config)
    assert llama.heads > llama.key_value_heads > 1  # grouped queries


@pytest.mark.parametrize("family", FAMILIES)
def test_embedded_model_continues_a_text(family: str) -> None:
    folder = str(EMBEDDED / family)
    model, tokenizer = (kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer))
    prompt = tokenizer("Return a string", return_tensors="pt")["input_ids"]
    ids = model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=3)
    assert tokenizer.decode(ids[0]).startswith("Return a string")
    assert ids.shape[1] > prompt.shape[1]


def test_embedded_files_are_small_and_licensed() -> None:
    files = [path for path in Path(str(EMBEDDED)).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files if path.suffix != ".py") < 6_000_000
    weights = [path for path in files if path.suffix == ".safetensors"]
    assert sum(path.stat().st_size for path in weights) < 5_000_000
    assert "Python Software Foundation" in (EMBEDDED / "LICENSE.txt").read_text(encoding="utf-8")


def test_calibration_and_held_out_text_are_disjoint() -> None:
    calibration, held_out = (
        (EMBEDDED / name).read_text(encoding="utf-8") for name in ("calibration.txt", "heldout.txt")
    )
    long_lines = {line for line in held_out.splitlines() if len(line) > 60}
    shared = [line for line in long_lines if line in calibration]
    assert len(long_lines) > 300
    assert len(shared) < 0.05 * len(long_lines)  # modules quote each other
