"""Engines are compared with the run; a difference that rounding does not explain is refused."""

import math
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from aespa_pl.errors import UserError
from aespa_pl.export.agreement import Asked, ask, beside_original, compare, reference_logits
from aespa_pl.export.engines import ENGINES, LlamaCpp, Transformers, Vllm
from aespa_pl.export.format import make_format
from aespa_pl.export.quantized import QuantizedModel
from tests.export.configurations import llama
from tests.export.conftest import MakeRun
from tests.export.gguf_files import llama_cpp, write
from tests.export.runs import VOCABULARY, Known, make_run, save_original

LENGTH = 48


@pytest.mark.parametrize("name", ["llama", "opt", "bloom", "opt-350m", "llama-untied"])
def test_reference_is_the_librarys_model_with_the_runs_weights(name: str, known: MakeRun) -> None:
    run = known(name, 3, 32)
    ids = torch.randint(0, VOCABULARY, (LENGTH,))
    chosen = make_format("compressed-tensors", None, "keep")
    with torch.inference_mode():
        expected = run.model(ids[None], use_cache=False).logits[0]
    assert torch.equal(reference_logits(QuantizedModel.open(run.folder), chosen, ids), expected)


def test_reference_of_hf_has_its_rounded_weights(known: MakeRun, tmp_path: Path) -> None:
    run, chosen = known("llama", 8, 32), make_format("hf", None, "keep")
    model, ids = QuantizedModel.open(run.folder), torch.randint(0, VOCABULARY, (LENGTH,))
    chosen.write(model, tmp_path, lambda: None)
    found = Transformers().logits(tmp_path, ids, VOCABULARY)
    agreement = compare(Transformers(), reference_logits(model, chosen, ids), found, ids)
    assert agreement.difference == 0
    with torch.inference_mode():
        exact = run.model(ids[None], use_cache=False).logits[0]
    assert not torch.equal(found, exact)


def test_the_distance_from_the_original_is_by_its_definition(known: MakeRun) -> None:
    run = known("llama", 3, 32)
    ids = torch.randint(0, VOCABULARY, (LENGTH,))
    original = AutoModelForCausalLM.from_pretrained(run.original, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits, before = (model(ids[None], use_cache=False).logits[0] for model in (run.model, original))
    p, q = before[:-1].double().softmax(-1), logits[:-1].double().softmax(-1)
    divergences = (p * (p / q).log()).sum(-1)
    perplexity = [math.exp(-float(x.gather(1, ids[1:, None]).log().mean())) for x in (q, p)]
    same = 100 * float((p.argmax(-1) == q.argmax(-1)).double().mean())
    said = beside_original(QuantizedModel.open(run.folder), logits, ids)
    assert said.startswith(
        f"KL {divergences.mean():.4f} nats, {divergences.max():.3f} at the 99.9 % quantile, "
    )
    assert f"the same top token at {same:.1f} % of {LENGTH - 1} positions, " in said
    assert said.endswith(f"perplexity {perplexity[0]:.2f} of {perplexity[1]:.2f}")


def noisy(logits: torch.Tensor, size: float) -> torch.Tensor:
    return logits + size * torch.randn_like(logits)


def test_divergence_and_perplexity_are_by_their_definitions() -> None:
    reference, ids = 3 * torch.randn(LENGTH, 20), torch.randint(0, 20, (LENGTH,))
    found = noisy(reference, 0.05)[LlamaCpp.first :]
    agreement = compare(LlamaCpp(), reference, found, ids)
    p, q = reference[LlamaCpp.first :].double().softmax(-1), found.double().softmax(-1)
    divergence = sum(
        float(p[i, j] * math.log(p[i, j] / q[i, j])) for i in range(len(p)) for j in range(20)
    ) / len(p)
    assert agreement.divergence == pytest.approx(divergence)
    following = ids[LlamaCpp.first + 1 :]
    for rows, value in ((p, agreement.reference), (q, agreement.perplexity)):
        losses = [-math.log(rows[i, token]) for i, token in enumerate(following)]
        assert value == pytest.approx(math.exp(sum(losses) / len(losses)))


def test_exact_engine_must_give_equal_logits() -> None:
    reference, ids = torch.randn(LENGTH, 20), torch.randint(0, 20, (LENGTH,))
    assert compare(Transformers(), reference, reference.clone(), ids).text.endswith("logits equal")
    found = reference.clone()
    found[3, 4] += 1e-6
    with pytest.raises(UserError, match="transformers runs the exported model in another way"):
        compare(Transformers(), reference, found, ids)


def test_engine_that_rounds_may_differ_a_little_only() -> None:
    reference, ids = 3 * torch.randn(LENGTH, 20), torch.randint(0, 20, (LENGTH,))
    first = LlamaCpp.first
    assert compare(LlamaCpp(), reference, noisy(reference, 0.05)[first:], ids).divergence > 0
    with pytest.raises(UserError, match=r"KL divergence .* nothing was kept. Use another --format"):
        compare(LlamaCpp(), reference, noisy(reference, 1)[first:], ids)


def test_rounding_that_moves_the_run_itself_as_far_is_allowed() -> None:
    """A model that answers small changes with large ones; an engine four times as far is still wrong."""
    reference, ids = 3 * torch.randn(LENGTH, 20), torch.randint(0, 20, (LENGTH,))
    first, rounded = LlamaCpp.first, noisy(reference, 0.4)
    found = rounded[first:]
    with pytest.raises(UserError, match="KL divergence"):
        compare(LlamaCpp(), reference, found, ids)
    assert compare(LlamaCpp(), reference, found, ids, rounded).divergence > 0.02
    with pytest.raises(UserError, match="KL divergence"):
        compare(LlamaCpp(), reference, noisy(reference, 3)[first:], ids, rounded)


@pytest.mark.parametrize(("width", "block"), [(512, 256), (576, 32), (40, 40)])
def test_llama_cpp_rounds_activations_to_steps_of_a_block(width: int, block: int) -> None:
    x = torch.randn(2, 3, width)
    x[0, 0, :block] = 0
    found = LlamaCpp().rounded(x)
    for row, result in zip(x.reshape(-1, block), found.reshape(-1, block), strict=True):
        step = float(row.abs().max()) / 127
        for value, rounded in zip(row.tolist(), result.tolist(), strict=True):
            expected = step * round(value / step) if step else 0.0
            assert rounded == pytest.approx(expected, abs=1e-6)


def test_reference_rounds_the_input_of_every_quantized_matrix(known: MakeRun) -> None:
    """Inputs that are rounded to nothing are the same as matrices of zeros."""
    run, ids = known("llama-biased", 3, 32), torch.randint(0, VOCABULARY, (LENGTH,))
    chosen = make_format("compressed-tensors", None, "keep")
    found = reference_logits(QuantizedModel.open(run.folder), chosen, ids, torch.zeros_like)
    model = deepcopy(run.model)
    with torch.inference_mode():
        for name in run.matrices:
            model.get_parameter(name).zero_()
        expected = model(ids[None], use_cache=False).logits[0]
    assert torch.equal(found, expected)


def test_shift_of_the_perplexity_is_found_where_the_divergence_is_small() -> None:
    """Each next token is 3 % less likely: far less than the bound on the divergence, and no chance."""
    ids = torch.randint(0, 20, (400,))
    reference = torch.zeros(400, 20)
    found = reference.clone()
    found[torch.arange(399), ids[1:]] -= 0.04
    with pytest.raises(UserError, match=r"perplexity 20.* instead of 20"):
        compare(Vllm(), reference, found, ids)


def test_wrong_order_of_rows_is_found(
    known: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mistake that llama.cpp loads without a word: query rows in transformers' order."""
    pytest.importorskip("xllamacpp", reason="needs llama.cpp: pip install xllamacpp")
    run = known("llama", 4, 32)
    model, chosen = QuantizedModel.open(run.folder), make_format("gguf", None, "keep")
    monkeypatch.setattr("aespa_pl.export.gguf.row_order", lambda *_: None)
    ids = torch.randint(0, 256, (LENGTH,))
    chosen.write(model, tmp_path, lambda: None)
    found = LlamaCpp().logits(tmp_path, ids, VOCABULARY)
    with pytest.raises(UserError, match=r"llama\.cpp runs the exported model in another way"):
        compare(LlamaCpp(), reference_logits(model, chosen, ids), found, ids)


def test_every_format_has_an_engine() -> None:
    formats = {name for engine in ENGINES for name in engine.formats}
    assert formats == {"hf", "compressed-tensors", "awq", "gptq", "gguf"}


@llama_cpp
def test_a_file_that_llama_cpp_can_not_load_ends_the_export(fresh: Known, tmp_path: Path) -> None:
    write(fresh, tmp_path)
    file = tmp_path / "model.gguf"
    file.write_bytes(file.read_bytes()[:-4000])
    with pytest.raises(UserError, match=r"llama.cpp can't load the exported model .*; nothing was kept"):
        LlamaCpp().logits(tmp_path, torch.arange(40), VOCABULARY)


def test_an_engine_that_is_asked_for_later_positions_is_left_out(tmp_path: Path) -> None:
    with torch.no_grad():
        original = save_original(llama(max_position_embeddings=24), tmp_path / "original")
        run = make_run(original, tmp_path / "version_0", 4, 32)
    model, chosen = QuantizedModel.open(run.folder), make_format("gguf", None, "keep")
    found = ask(model, chosen, tmp_path, Asked([LlamaCpp()]))
    assert found.unchecked == {"llama.cpp": "the model has 24 positions only"}
