"""Reading block by block gives the model that the library loads, and nothing stays behind."""

import gc
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from aespa_pl.errors import UserError
from aespa_pl.models import family_of
from aespa_pl.models.pretrained import PretrainedFolder
from tests.models.examples import EXAMPLES, VOCABULARY, make_ids, make_model, save
from tests.walks import save_with_words

CPU = torch.device("cpu")
SHARD = "8KB"
"""Largest size of a shard; the models have 60 kB, so some blocks lie in several shards."""


def stream(folder: Path, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the logits, only one block at a time being real."""
    pretrained = PretrainedFolder.open(folder)
    family = family_of(pretrained.config)
    model = pretrained.skeleton()
    pretrained.load_stem(model, CPU, dtype)
    hidden, _ = family.embed(model, ids)
    for index in range(pretrained.config.num_hidden_layers):
        block = pretrained.load_block(model, index, CPU, dtype)
        hidden = family.run_block(block, hidden, family.arguments(model, hidden))
        pretrained.release_block(model, index)
    return family.head(model, hidden)


@pytest.mark.parametrize("name", ["opt-350m", "bloom", "llama-grouped", "phi3", "qwen3-moe", "gpt-oss"])
def test_logits_of_several_shards_are_the_librarys(name: str, tmp_path: Path) -> None:
    """Those of one file are in test_streamed.py, of every family."""
    model, ids = make_model(name, torch.float32), make_ids()
    save(model, tmp_path, SHARD)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)(ids, use_cache=False).logits
    torch.testing.assert_close(stream(tmp_path, ids), expected.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["glm4-moe", "ernie4.5-moe", "hunyuan-moe", "lfm2-moe", "minimax", "glm4-flash"]
)
def test_what_chooses_experts_is_float32_in_half_precision(name: str, tmp_path: Path) -> None:
    """A correction of 4 has steps of 0.03 in bfloat16, which is more than scores differ by."""
    pretrained = PretrainedFolder.open(save(make_model(name, torch.float32), tmp_path))
    index = pretrained.config.num_hidden_layers - 1
    state = pretrained.load_block(pretrained.skeleton(), index, CPU, torch.bfloat16).state_dict()
    exact = {name for name in state if state[name].dtype == torch.float32}
    assert exact == {name for name in state if name.endswith(pretrained.family.exact)} != set()
    assert all(state[name].dtype == torch.bfloat16 for name in state.keys() - exact)
    for short in exact:
        assert torch.equal(state[short], pretrained.tensor(pretrained.family.block_prefix(index) + short))


def test_a_tensor_is_read_in_the_type_that_it_is_stored_in(tmp_path: Path) -> None:
    pretrained = PretrainedFolder.open(save(make_model("lfm2-moe", torch.bfloat16), tmp_path))
    name = "model.layers.2.feed_forward.expert_bias"
    assert pretrained.tensor(name).dtype == torch.bfloat16
    assert (
        pretrained.load_block(pretrained.skeleton(), 2, CPU, torch.bfloat16)
        .state_dict()["feed_forward.expert_bias"]
        .dtype
        == torch.float32
    )


@pytest.mark.parametrize("name", ["opt", "bloom", "llama-grouped"])
def test_base_model_without_prefix_and_head_is_read(name: str, tmp_path: Path) -> None:
    """Weights are stored as bigscience/bloom's and the first OPT models' are; the head is the embedding."""
    model, ids = make_model(name, torch.float32), make_ids()
    save(model, tmp_path)
    path = tmp_path / "model.safetensors"
    prefix = f"{model.base_model_prefix}."
    save_file({name.removeprefix(prefix): t for name, t in load_file(path).items()}, path)
    torch.testing.assert_close(stream(tmp_path, ids), model(ids, use_cache=False).logits)
    names = PretrainedFolder.open(tmp_path).stem_names()
    assert all(name.startswith(prefix) for name in names)


def change_names(folder: Path, change: Callable[[str], str]) -> None:
    path = folder / "model.safetensors"
    save_file({change(name): tensor for name, tensor in load_file(path).items()}, path)


def test_head_alone_of_a_tied_pair_is_enough(tmp_path: Path) -> None:
    model, ids = make_model("opt", torch.float32), make_ids()
    save(model, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors.pop("model.decoder.embed_tokens.weight")
    save_file(tensors, path)
    torch.testing.assert_close(stream(tmp_path, ids), model(ids, use_cache=False).logits)


@pytest.mark.parametrize("name", ["opt", "bloom", "llama", "llama-grouped", "qwen3"])
def test_names_are_those_of_the_state_dict(name: str, tmp_path: Path) -> None:
    model = make_model(name, torch.float32)
    pretrained = PretrainedFolder.open(save(model, tmp_path, SHARD))
    family = family_of(model.config)
    stem = pretrained.stem_names()
    blocks = [name for i in range(3) for name in pretrained.block_names(i)]
    expected = set(model.state_dict())
    if model.config.tie_word_embeddings:
        expected -= {"lm_head.weight"}
    assert {*stem, *blocks} == expected
    assert len(stem) + len(blocks) == len(expected)
    assert all(name.startswith(f"{family.blocks_path}.") for name in blocks)
    for name in expected:
        assert torch.equal(pretrained.tensor(name), model.state_dict()[name])
    assert torch.equal(pretrained.tensor("lm_head.weight"), model.lm_head.weight)


def test_block_ten_is_not_block_one(tmp_path: Path) -> None:
    settings = EXAMPLES["opt"]()
    settings.num_hidden_layers = 11
    pretrained = PretrainedFolder.open(save(AutoModelForCausalLM.from_config(settings), tmp_path))
    first = pretrained.block_names(1)
    assert len(first) == 16
    assert not set(first) & set(pretrained.block_names(10))


def test_skeleton_has_no_weights(tmp_path: Path) -> None:
    pretrained = PretrainedFolder.open(save(make_model("llama", torch.float32), tmp_path))
    model = pretrained.skeleton()
    assert not model.training
    assert not model.config.use_cache
    assert pretrained.config.use_cache  # what is exported stays as it was
    for parameter in model.parameters():
        assert parameter.is_meta
        assert not parameter.requires_grad


def test_block_loaded_in_inference_mode_can_be_released_outside(tmp_path: Path) -> None:
    """A generator that is abandoned in the middle of an evaluation does so."""
    pretrained = PretrainedFolder.open(save(make_model("opt", torch.float32), tmp_path))
    model = pretrained.skeleton()
    with torch.inference_mode():
        block = pretrained.load_block(model, 0, CPU, torch.float32)
    pretrained.release_block(model, 0)
    assert all(parameter.is_meta for parameter in block.parameters())


def test_loaded_weights_are_free_of_the_file(tmp_path: Path) -> None:
    """The weights are changed in place, and the file may go."""
    pretrained = PretrainedFolder.open(save(make_model("opt", torch.float32), tmp_path))
    model = pretrained.skeleton()
    block = pretrained.load_block(model, 0, CPU, torch.float32)
    next(block.parameters()).zero_()
    again = pretrained.load_block(pretrained.skeleton(), 0, CPU, torch.float32)
    assert bool(next(again.parameters()).any())
    mapped = Path("/proc/self/maps")
    if mapped.exists():
        gc.collect()
        assert str(tmp_path) not in mapped.read_text()


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_type_is_the_one_that_is_stored(stored: torch.dtype, tmp_path: Path) -> None:
    model = make_model("llama", stored)
    pretrained = PretrainedFolder.open(save(model, tmp_path))
    assert pretrained.dtype == stored
    name = "model.layers.0.mlp.up_proj.weight"
    assert pretrained.tensor(name).dtype == stored
    block = pretrained.load_block(pretrained.skeleton(), 0, CPU, torch.float32)
    weight = block.get_parameter("mlp.up_proj.weight")
    assert torch.equal(weight, model.state_dict()[name].float())
    assert weight.dtype == torch.float32


def test_frequencies_stay_in_single_precision(tmp_path: Path) -> None:
    pretrained = PretrainedFolder.open(save(make_model("llama", torch.bfloat16), tmp_path))
    model = pretrained.skeleton()
    pretrained.load_stem(model, CPU, torch.bfloat16)
    expected = 10000.0 ** -(torch.arange(3) / 3)
    torch.testing.assert_close(model.get_submodule("model.rotary_emb").inv_freq, expected)
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16


def test_tokenizer_is_read(tmp_path: Path) -> None:
    pretrained = PretrainedFolder.open(save(make_model("opt", torch.float32), tmp_path))
    assert len(pretrained.tokenizer()) == VOCABULARY
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"the tokenizer in .* cannot be read"):
        pretrained.tokenizer()


def spoil(model: PreTrainedModel, name: str, value: float) -> None:
    model.state_dict()[name].view(-1)[3] = value


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = make_model("opt", torch.float32)
    spoil(model, "model.decoder.layers.1.fc1.weight", torch.nan)
    spoil(model, "model.decoder.embed_positions.weight", torch.inf)
    pretrained = PretrainedFolder.open(save(model, tmp_path))
    skeleton = pretrained.skeleton()
    pretrained.load_block(skeleton, 0, CPU, torch.float32)
    with pytest.raises(UserError, match=r"layers.1.fc1.weight in .*model.safetensors has NaN"):
        pretrained.load_block(skeleton, 1, CPU, torch.float32)
    with pytest.raises(UserError, match=r"embed_positions.weight in .*model.safetensors has NaN"):
        pretrained.load_stem(skeleton, CPU, torch.float32)


@pytest.mark.parametrize("value", [1e5, -7e4])
def test_a_tensor_beyond_float16_is_found_by_reading_it_in_that_type(value: float, tmp_path: Path) -> None:
    model = make_model("opt", torch.float32)
    name = "model.decoder.layers.2.fc1.weight"
    spoil(model, name, value)
    pretrained = PretrainedFolder.open(save(model, tmp_path))
    assert float(pretrained.tensor(name).view(-1)[3]) == value
    assert pretrained.tensor(name, torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(UserError, match=rf"model.dtype: tensor {name} .* torch.float16: set"):
        pretrained.tensor(name, torch.float16)


@pytest.mark.parametrize("name", ["opt", "bloom", "llama-grouped"])
def test_a_good_folder_has_nothing_left_over(name: str, tmp_path: Path) -> None:
    pretrained = PretrainedFolder.open(save(make_model(name, torch.float32), tmp_path))
    assert pretrained.extra == ()
    assert pretrained.unused() is None


@pytest.mark.parametrize("prefix", [True, False], ids=["causal-LM", "base model"])
@pytest.mark.parametrize("name", ["opt", "bloom", "llama"])
def test_fewer_blocks_in_the_configuration_are_said(name: str, prefix: bool, tmp_path: Path) -> None:
    model = make_model(name, torch.float32)
    save(model, tmp_path)
    if not prefix:
        change_names(tmp_path, lambda key: key.removeprefix(f"{model.base_model_prefix}."))
    model.config.num_hidden_layers = 1
    model.config.save_pretrained(tmp_path)
    pretrained = PretrainedFolder.open(tmp_path)
    assert pretrained.unused() == (
        f"config.json has 1 blocks, the files in {tmp_path} have 3: the others are left out"
    )


def test_tensors_without_a_place_are_said(tmp_path: Path) -> None:
    path = save(make_model("opt", torch.float32), tmp_path) / "model.safetensors"
    extra = {f"layers.0.adapter.{i}": torch.ones(2) for i in "abcd"}
    save_file({**load_file(path), **extra}, path)
    pretrained = PretrainedFolder.open(tmp_path)
    assert pretrained.extra == tuple(extra)
    assert str(pretrained.unused()).endswith(
        "are left out: 4 (layers.0.adapter.a, layers.0.adapter.b, layers.0.adapter.c ...)"
    )


def test_matrices_of_experts_are_contiguous_however_they_are_stored(tmp_path: Path) -> None:
    """Products with other strides round in another way, and a continued run would end with other bits."""
    folder = save(make_model("gpt-oss", torch.float32), tmp_path)
    pretrained = PretrainedFolder.open(folder)
    for name in pretrained.block_names(0):
        assert pretrained.tensor(name).is_contiguous()


def test_code_that_comes_with_a_model_never_runs(tmp_path: Path) -> None:
    folder = save_with_words(make_model("llama"), tmp_path / "model")
    ran = tmp_path / "ran"
    (folder / "foreign.py").write_text(f"open({str(ran)!r}, 'w').close()")
    model = {"AutoConfig": "foreign.Config", "AutoModelForCausalLM": "foreign.Model"}
    for name, classes in (("config", model), ("tokenizer_config", {"AutoTokenizer": ["foreign.T", None]})):
        file = folder / f"{name}.json"
        content = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(content | {"auto_map": classes}))
    opened = PretrainedFolder.open(folder)
    opened.skeleton()
    opened.tokenizer()
    assert not ran.exists()
