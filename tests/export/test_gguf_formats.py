"""A run in llama.cpp's types becomes a file with the same types and values."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from safetensors import safe_open

from aespa_pl.errors import UserError
from aespa_pl.export.compressed_tensors import Awq, CompressedTensors
from aespa_pl.export.folder import HuggingFace
from aespa_pl.export.gguf import Gguf
from aespa_pl.export.gguf_values import dequantized
from aespa_pl.export.model_card import model_card
from aespa_pl.export.quantized import QuantizedModel, value_of
from tests.cli.commands import CommandLine
from tests.disks import flip
from tests.export.configurations import llama
from tests.export.folders import written
from tests.export.runs import save_original

TYPES = {
    "token_embd": "Q2_K",
    "output": "Q6_K",
    "blk.0.attn_q": "Q2_K",
    "blk.0.attn_v": "Q3_K",
    "blk.1.attn_output": "Q3_K",
    "blk.1.ffn_down": "Q3_K",
    "blk.1.ffn_up": "Q2_K",
}
"""Some of llama.cpp's types of the mixture Q2_K for two query heads a key."""


def fit(original: Path, folder: Path, segments: int, length: int, *words: object) -> Path:
    """Quantize a model with segments of the embedded text, and return the run."""
    status, out, err = CommandLine()(
        "fit", "--model.pretrained", original, "--data.calibration.source", "embedded",
        "--data.calibration.segments", segments, "--data.calibration.segment_length", length,
        "--data.evaluation.texts", "[]", "--output.folder", folder, *words,
    )  # fmt: skip
    assert (status, err) == (0, ""), err
    assert re.search(r"\bQ\d_", out)  # the types are told
    return Path(out.splitlines()[-1])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of OPTQ, end-to-end training included, of a model whose head is not tied."""
    folder = tmp_path_factory.mktemp("formats")
    config = llama(hidden_size=256, intermediate_size=256, tie_word_embeddings=False)
    original = save_original(config, folder / "original")
    return fit(
        original, folder, 6, 32, "--quantization.format", "Q2_K", "--quantization.method", "optq",
        "--quantization.tuning.model.enabled", "true", "--quantization.tuning.model.epochs", 1,
    )  # fmt: skip


def test_every_tensor_has_llama_cpps_type_and_the_runs_values(run: Path, tmp_path: Path) -> None:
    written(run, Gguf(), tmp_path)
    reader = GGUFReader(tmp_path / "model.gguf")
    tensors = {tensor.name.removesuffix(".weight"): tensor for tensor in reader.tensors}
    assert {name: tensors[name].tensor_type.name for name in TYPES} == TYPES
    assert reader.get_field("general.file_type").contents() == 10
    assert json.loads(reader.get_field("aespa_pl.quantization").contents())["format"] == "Q2_K"
    # the model folder has the same embedding and head, in the original's float16
    with safe_open(next((run / "model").glob("model-00001*")), "pt") as file:
        for ours, theirs in (("model.embed_tokens", "token_embd"), ("lm_head", "output")):
            found = dequantized(tensors[theirs].data, tensors[theirs].tensor_type)
            assert torch.equal(torch.tensor(found).half(), file.get_tensor(f"{ours}.weight"))


def test_the_size_counts_every_tensor_as_the_file_has_it(run: Path, tmp_path: Path) -> None:
    status, _, err = CommandLine()(
        "test", "--ckpt_path", run, "--data.evaluation.texts", "[embedded]",
        "--data.evaluation.segment_length", 32, "--data.evaluation.max_segments", 1,
    )  # fmt: skip
    assert (status, err) == (0, ""), err
    size = json.loads((run / "test.json").read_text())["size"]["quantized"]["bytes"]
    written(run, Gguf(), tmp_path)
    tensors = GGUFReader(tmp_path / "model.gguf").tensors
    # norms: float32 in the file, float16 in the original
    assert size == sum(t.n_bytes // (2 if len(t.shape) == 1 else 1) for t in tensors)


def test_the_embedding_is_near_the_original(run: Path) -> None:
    model = QuantizedModel.open(run)
    with safe_open(next(model.original.glob("*.safetensors")), "pt") as file:
        # rounding of a normal variable to 4 levels leaves 0.34 of its size (Lloyd-Max), to 64 levels 0.02;
        # the head makes up for errors at its outputs with larger ones in its weights
        for name, bound in (("model.embed_tokens.weight", 0.34), ("lm_head.weight", 2 * 0.02)):
            original = file.get_tensor(name).float()
            error = (value_of(model.stem(name)) - original).norm() / original.norm()
            assert error < bound


def test_other_formats_send_to_gguf(run: Path) -> None:
    model = QuantizedModel.open(run)
    with pytest.raises(UserError, match=r"Q2_K of llama.cpp.*only llama.cpp reads.*--format gguf"):
        Awq().refuse(model)
    HuggingFace().refuse(model)


def test_a_stem_that_is_damaged_is_noticed(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "version_0"))
    flip(copy / "blocks" / "stem.safetensors")
    with pytest.raises(UserError, match=r"stem\.safetensors"):
        QuantizedModel.open(copy)


def test_a_uniform_run_has_an_embedding_in_a_type(tmp_path: Path) -> None:
    original = save_original(llama(hidden_size=256, intermediate_size=256), tmp_path / "original")
    run = fit(
        original, tmp_path, 4, 32, "--quantization.types", "{embedding: Q6_K}",
        "--quantization.method", "rtn", "--quantization.bits", 4, "--quantization.symmetric", "true",
        "--quantization.group_size", 32,
    )  # fmt: skip
    for chosen in (Gguf(), CompressedTensors()):
        model = written(run, chosen, tmp_path / chosen.name)
    tensors = {t.name: t for t in GGUFReader(tmp_path / "gguf" / "model.gguf").tensors}
    embedding = tensors["token_embd.weight"]
    assert embedding.tensor_type.name == "Q6_K"
    assert tensors["blk.0.attn_q.weight"].tensor_type.name == "Q4_0"
    card = model_card(model, Gguf(), "", {})
    assert "symmetric; embedding in Q6_K; not quantized: norms." in card
    assert (
        "embedding in Q6_K; the values of embedding (Q6_K) are stored in the original's type; "
        "not quantized: norms." in model_card(model, CompressedTensors(), "", {})
    )
    with pytest.raises(UserError, match=r"the run has its embedding in Q6_K. Leave --embedding out"):
        Gguf("q8_0").refuse(model)
    with safe_open(next((run / "model").glob("model-00001*")), "pt") as file:
        held = torch.tensor(dequantized(embedding.data, embedding.tensor_type)).half()
        assert torch.equal(held, file.get_tensor("model.embed_tokens.weight"))


def test_query_and_key_of_two_types_with_the_same_bits_keep_their_own_grids(tmp_path: Path) -> None:
    config = llama(hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    original = save_original(config, tmp_path / "original")
    run = fit(
        original, tmp_path, 8, 64, "--quantization.format", "Q5_0",
        "--quantization.types", "{k_proj: Q5_1}", "--quantization.method", "aespa-fast",
    )  # fmt: skip
    model = written(run, Gguf(), tmp_path)
    with safe_open(next(original.glob("*.safetensors")), "pt") as file:
        for name in ("q_proj", "k_proj"):
            key = f"model.layers.0.self_attn.{name}.weight"
            weight, found = file.get_tensor(key).float(), model.block(0)[key].weight()
            # zeta moves columns between the norm and the weights; the size of the error stays
            assert (found / found.norm(dim=0) - weight / weight.norm(dim=0)).norm() < 0.1 * 64**0.5
