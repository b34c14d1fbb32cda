"""A run whose projections have different bits: GGUF has a type for each, other formats one container."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader

from aespa_pl.errors import UserError
from aespa_pl.export.compressed_tensors import Awq, CompressedTensors
from aespa_pl.export.folder import FolderFormat, Gptq
from aespa_pl.export.format import Format
from aespa_pl.export.gguf import Gguf
from aespa_pl.export.gguf_model import column_order, row_order
from aespa_pl.export.quantized import QuantizedModel
from tests.export.conftest import MakeRun
from tests.export.folders import written
from tests.export.gguf_files import Q
from tests.export.runs import CONFIGS, Known, make_run, save_original

BITS_OF = {"down_proj": 4, "v_proj": 3}


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Known:
    """Return a run with 2 bits in most projections, which are 256 and 512 wide."""
    folder = tmp_path_factory.mktemp("several")
    with torch.no_grad():
        original = save_original(CONFIGS["llama-wide"](), folder / "original")
        return make_run(original, folder / "version_0", 2, None, bits_of=BITS_OF)


def read_back(run: Known, chosen: Format, folder: Path) -> None:
    """Write a folder and compare what the format's own reader gets of each matrix."""
    model = written(run.folder, chosen, folder)
    found = {name: value for name, value, _ in chosen.read(model, folder)}
    for name in run.matrices:  # a GGUF file has the rows of q and k in another order, which it undoes
        assert torch.equal(found[name].float(), run.weight(name)), name


def test_gguf_has_a_type_for_each_matrix(several: Known, tmp_path: Path) -> None:
    read_back(several, Gguf(), tmp_path / "packed")
    tensors = GGUFReader(tmp_path / "packed" / "model.gguf").tensors
    types = {tensor.name: tensor.tensor_type for tensor in tensors}
    assert types["blk.1.ffn_down.weight"] == types["blk.1.attn_v.weight"] == Q.Q4_K
    assert types["blk.1.attn_q.weight"] == types["blk.0.ffn_gate.weight"] == Q.Q2_K


@pytest.mark.parametrize(
    "chosen",
    [CompressedTensors(4), CompressedTensors(8), Gptq(4), Gptq(8), Awq(4)],
    ids=lambda chosen: f"{chosen.name} {chosen.container_bits}",
)
def test_a_container_holds_all_of_them(chosen: FolderFormat, several: Known, tmp_path: Path) -> None:
    read_back(several, chosen, tmp_path / "packed")


@pytest.mark.parametrize("chosen", [CompressedTensors(), Gptq(), Awq()], ids=lambda c: c.name)
def test_without_a_container_they_are_refused(chosen: FolderFormat, several: Known) -> None:
    model = QuantizedModel.open(several.folder)
    assert model.matrix_bits == (2, 3, 4)
    with pytest.raises(
        UserError,
        match=r"\(2 and 3 and 4 bits, per channel.*Add --container_bits 4, in which .* --format gguf",
    ):
        chosen.refuse(model)


def test_formats_that_are_named_instead_hold_the_run(tmp_path: Path) -> None:
    """llama.cpp has no OPT, so it is not named, and compressed-tensors needs a container."""
    with torch.no_grad():
        original = save_original(CONFIGS["opt"](), tmp_path / "original")
        run = make_run(original, tmp_path / "version_0", 3, None, bits_of={"fc1": 2})
    model = QuantizedModel.open(run.folder)
    with pytest.raises(UserError, match=r"all integers take 4 bits$"):
        CompressedTensors().refuse(model)
    with pytest.raises(UserError, match=r"Use --format compressed-tensors --container_bits 4 \(t"):
        Gguf().refuse(model)
    CompressedTensors(4).refuse(model)


def test_formats_without_a_tokenizer_do_not_read_it(tmp_path: Path) -> None:
    with torch.no_grad():
        original = save_original(CONFIGS["llama"](), tmp_path / "original")
        run = make_run(original, tmp_path / "version_0", 4, None)
    (original / "tokenizer.json").write_text("{")
    Gptq().refuse(QuantizedModel.open(run.folder))


def test_a_run_of_an_earlier_version_has_the_same_bits_everywhere(known: MakeRun) -> None:
    assert QuantizedModel.open(known("llama", 3, None).folder).matrix_bits == (3,)


def test_a_kept_projection_is_no_quantized_matrix_but_has_its_rows_in_the_order_of_llama_cpp(
    several: Known,
) -> None:
    model = QuantizedModel.open(several.folder)
    quantization = replace(model.settings.quantization, bits_of={"q_proj": 16})
    kept = replace(model, settings=replace(model.settings, quantization=quantization))
    name = "model.layers.1.self_attn.q_proj.weight"
    assert name in model.matrices
    assert name not in kept.matrices
    assert name.removesuffix(".weight") in kept.unquantized_linears()
    order = row_order(model, name)
    assert order is not None
    assert not torch.equal(order, order.sort().values)
    assert torch.equal(order, row_order(kept, name))


def keeping(run: Known, *names: str) -> QuantizedModel:
    """Return the model of a run that has kept the projections of these names, whose files it has not."""
    model = QuantizedModel.open(run.folder)
    quantization = replace(model.settings.quantization, bits_of=dict.fromkeys(names, 16))
    return replace(model, settings=replace(model.settings, quantization=quantization))


def test_engines_of_gptq_would_take_a_kept_layer_for_a_packed_one(known: MakeRun) -> None:
    run = known("llama", 4, 32)
    Gptq().refuse(QuantizedModel.open(run.folder))
    with pytest.raises(UserError, match=r"down_proj keeps its weights.* Use --format compressed-tensors"):
        Gptq().refuse(keeping(run, "down_proj"))


def test_experts_that_are_kept_in_part_are_no_tensor_of_llama_cpp(known: MakeRun) -> None:
    run = known("mixtral", 4, 32)
    Gguf().refuse(keeping(run, *(f"expert_{i}_down_proj" for i in range(4))))
    with pytest.raises(UserError, match=r"some experts keep their weights.*blk\.0\.ffn_down_exps\.weight"):
        Gguf().refuse(keeping(run, "expert_0_down_proj"))


def test_experts_that_are_kept_are_read_by_no_engine_of_compressed_tensors(known: MakeRun) -> None:
    run = known("qwen3-moe", 4, 32, symmetric=True)
    CompressedTensors().refuse(keeping(run, "q_proj"))
    with pytest.raises(UserError, match=r"either all experts as integers or none\. Use --format hf"):
        CompressedTensors().refuse(keeping(run, "expert_0_down_proj"))


def test_a_kept_layer_of_linear_attention_comes_back_in_its_order(known: MakeRun, tmp_path: Path) -> None:
    model = keeping(known("qwen3.5-grouped", 4, None), "out_proj")
    name = "model.layers.0.linear_attn.out_proj.weight"
    assert column_order(model, name) is not None
    assert isinstance(model.block(0)[name], torch.Tensor)
    Gguf(embedding="keep").write(model, tmp_path, lambda: None)
    found = {name: value for name, value, _ in Gguf().read(model, tmp_path)}
    stored = model.block(0)[name]
    assert isinstance(stored, torch.Tensor)
    assert torch.equal(found[name], stored.float())


def test_vllm_wants_all_of_one_matrix_as_integers(known: MakeRun) -> None:
    run = known("llama", 4, 32)
    whole, part = keeping(run, "q_proj", "k_proj", "v_proj"), keeping(run, "up_proj")
    Awq().refuse(whole)
    assert CompressedTensors().remark(whole) is None
    with pytest.raises(
        UserError, match=r"gate_proj, up_proj in one matrix, of which up_proj are no integers"
    ):
        Awq().refuse(part)
    CompressedTensors().refuse(part)  # transformers reads it
    assert "vLLM does not" in str(CompressedTensors().remark(part))
