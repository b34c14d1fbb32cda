"""Of a multimodal model the text model is quantized, which says of text what the whole says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5Tokenizer,
)

from aespa_pl.commands.evaluate import quantized_folder
from aespa_pl.errors import UserError
from aespa_pl.evaluation.tasks import load_whole
from aespa_pl.models.headers import read_config
from aespa_pl.models.multimodal import CONFIG, MULTIMODAL, ONE_POSITION, TOKENIZER
from aespa_pl.models.pretrained import PretrainedFolder
from aespa_pl.models.streamed import StreamedModel
from aespa_pl.settings import ModelSettings
from tests.models.examples import EXAMPLES, make_ids, save

SIDES = {"image_size": 16, "patch_size": 4}
ENCODER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
OF_QWEN = {
    "hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "patch_size": 4,
    "out_hidden_size": 24, "num_position_embeddings": 16, "deepstack_visual_indexes": [],
}  # fmt: skip
OF_GEMMA4 = {**ENCODER, **SIDES, "head_dim": 8, "global_head_dim": 8, "num_key_value_heads": 2}
OF_UNIFIED = {
    "patch_size": 2, "mm_embed_dim": 16, "mm_posemb_size": 8, "num_soft_tokens": 4, "output_proj_dims": 16,
}  # fmt: skip
OF_QWEN2 = {"depth": 1, "embed_dim": 16, "hidden_size": 24, "num_heads": 2, "patch_size": 4}
OF_QWEN2_5 = {**OF_QWEN, "fullatt_block_indexes": [0]}
WHOLES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3": ("gemma3", "gemma3", {**ENCODER, **SIDES}),
    "gemma4": ("gemma4", "gemma4-moe", OF_GEMMA4),
    "gemma4, gemma4-small": ("gemma4", "gemma4-small", OF_GEMMA4),
    "gemma4_unified": ("gemma4_unified", "gemma4-full", OF_UNIFIED),
    "mistral3": ("mistral3", "mistral", {"model_type": "pixtral", "head_dim": 8, **ENCODER, **SIDES}),
    "mistral3, ministral3": (
        "mistral3", "ministral3", {"model_type": "pixtral", "head_dim": 8, **ENCODER, **SIDES},
    ),
    "qwen3_5": ("qwen3_5", "qwen3.5", OF_QWEN),
    "qwen3_5_moe": ("qwen3_5_moe", "qwen3.5-moe", OF_QWEN),
    "lfm2_vl": ("lfm2_vl", "lfm2", {"model_type": "siglip2_vision_model", **ENCODER, "patch_size": 4}),
    "smolvlm": ("smolvlm", "llama", {**ENCODER, **SIDES}),
    "qwen2_vl": ("qwen2_vl", "qwen2", OF_QWEN2),
    "qwen2_5_vl": ("qwen2_5_vl", "qwen2", OF_QWEN2_5),
    "qwen3_vl": ("qwen3_vl", "qwen3", OF_QWEN),
    "internvl": ("internvl", "qwen2", {**ENCODER, "image_size": [16, 16], "patch_size": [4, 4]}),
}  # fmt: skip
"""Multimodal models: their type, the example that is their text model, the encoder."""


def make_whole(name: str, **options: Any) -> PreTrainedModel:
    """Return a tiny multimodal model with random weights."""
    kind, text, encoder = WHOLES[name]
    of_text = EXAMPLES[text]().to_dict()
    if kind in ONE_POSITION:  # of the columns of a half, so many turn with time, height and width
        others = of_text.get("head_dim", 6) // 2 - 2
        of_text["rope_parameters"]["mrope_section"] = [others, 1, 1]
    parts = {"text_config": of_text, "vision_config": encoder}
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **parts, **options))
    for parameter in model.requires_grad_(requires_grad=False).parameters():
        noise = torch.randn_like(parameter)
        parameter.copy_(noise * 0.3 if parameter.dim() > 1 else 1 + 0.4 * noise)
    return model.eval()


def change_config(folder: Path, change: Callable[[dict[str, Any]], None], name: str = CONFIG) -> None:
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))


def as_read(config: PreTrainedConfig) -> dict[str, Any]:
    """Return what a configuration states, but for where it comes from and how it was saved."""
    return {
        key: value
        for key, value in config.to_dict().items()
        if key not in ("_name_or_path", "architectures", "transformers_version")
    }


def test_each_type_has_an_example() -> None:
    assert {kind for kind, _, _ in WHOLES.values()} == {*MULTIMODAL}


@pytest.mark.parametrize("name", WHOLES)
def test_the_text_model_gives_the_logits_of_the_whole(name: str, tmp_path: Path) -> None:
    whole, ids = make_whole(name), make_ids()
    folder, expected = save(whole, tmp_path / "whole"), whole(input_ids=ids).logits
    pretrained = PretrainedFolder.open(folder)
    streamed = StreamedModel.open(pretrained, torch.device("cpu"), torch.float32)
    hidden = streamed.embed(ids, len(ids))
    for index in range(streamed.block_count):
        with streamed.block(index) as block:
            streamed.advance(block, hidden)
    with streamed.stem():
        logits = streamed.family.head(streamed.model, hidden[0])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    whole_again = load_whole(folder, torch.device("cpu"), torch.float32)
    assert pretrained.own_files["config.json"]["architectures"] == [type(whole_again).__name__]
    torch.testing.assert_close(whole_again(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", WHOLES)
def test_the_configuration_of_the_text_model_is_what_was_read(name: str, tmp_path: Path) -> None:
    pretrained = PretrainedFolder.open(save(make_whole(name), tmp_path / "whole"))
    (tmp_path / "config.json").write_text(json.dumps(pretrained.own_files["config.json"]))
    assert as_read(AutoConfig.from_pretrained(tmp_path)) == as_read(pretrained.config)
    if name in ONE_POSITION:  # no engine finds three positions in it
        stated = pretrained.own_files["config.json"]["rope_parameters"]
        assert stated.keys() == {"rope_type", "rope_theta"}


def test_what_is_left_out_is_said_by_its_part(tmp_path: Path) -> None:
    """The encoder has four blocks, and the text model three, but that is no mistake of config.json."""
    folder = save(make_whole("lfm2_vl"), tmp_path)
    assert PretrainedFolder.open(folder).unused() == (
        f"the text model of {folder} is quantized, without multi_modal_projector, vision_tower"
    )
    fewer = {"num_hidden_layers": 2, "layer_types": ["full_attention", "conv"]}
    change_config(folder, lambda content: content["text_config"].update(fewer))
    assert PretrainedFolder.open(folder).unused() == (
        f"config.json has 2 blocks, the files in {folder} have 3: the others are left out"
    )


@pytest.mark.parametrize("borrowed", [True, False])
def test_keys_that_a_block_borrows_are_left_out_without_a_word(borrowed: bool, tmp_path: Path) -> None:
    """Files of Gemma 4 E2B and E4B may have them."""
    folder, name = save(make_whole("gemma4, gemma4-small"), tmp_path), "k_proj" if borrowed else "other_proj"
    file = folder / "model.safetensors"
    extra = {f"model.language_model.layers.2.self_attn.{name}.weight": torch.ones(4, 4)}
    save_file(load_file(file) | extra, file, {"format": "pt"})
    said = str(PretrainedFolder.open(folder).unused())
    assert said.endswith("vision_tower")
    assert ("language_model" in said) != borrowed


def test_more_blocks_in_the_files_of_gemma4_are_said(tmp_path: Path) -> None:
    folder = save(make_whole("gemma4, gemma4-small"), tmp_path)
    file = folder / "model.safetensors"
    extra = {"model.language_model.layers.7.self_attn.k_proj.weight": torch.ones(4, 4)}
    save_file(load_file(file) | extra, file, {"format": "pt"})
    assert str(PretrainedFolder.open(folder).unused()).startswith("config.json has 3 blocks, the files in")


def test_the_type_is_that_of_the_whole_where_it_states_one(tmp_path: Path) -> None:
    """Without weights a plan knows the type from config.json alone."""
    folder = save(make_whole("smolvlm").bfloat16(), tmp_path)
    change_config(folder, lambda content: content["text_config"].update(dtype="float32"))
    assert read_config(folder).dtype == torch.bfloat16
    assert PretrainedFolder.open(folder).own_files["config.json"]["dtype"] == "bfloat16"


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_is_what_the_files_have(tied: bool, tmp_path: Path) -> None:
    """transformers ties the head of a mistral3 unless its files have another one, whatever Mistral's is."""
    folder = save(make_whole("mistral3", tie_word_embeddings=tied), tmp_path)

    def forget(content: dict[str, Any]) -> None:
        del content["tie_word_embeddings"], content["text_config"]["tie_word_embeddings"]

    change_config(folder, forget)
    assert read_config(folder).tie_word_embeddings is False  # of a Mistral, as long as no files are there
    pretrained = PretrainedFolder.open(folder)
    assert pretrained.config.tie_word_embeddings is tied
    assert pretrained.own_files["config.json"]["tie_word_embeddings"] is tied
    assert ("head" in pretrained.embeddings()) is not tied
    if tied:  # a head that is asked for, and that no file has
        change_config(folder, lambda content: content.update(tie_word_embeddings=False))
        with pytest.raises(UserError, match=r"tensor lm_head.weight is missing in "):
            PretrainedFolder.open(folder)
    assert ("language_model.lm_head.weight" in load_file(folder / "model.safetensors")) is not tied


def test_a_text_model_without_a_family_is_refused(tmp_path: Path) -> None:
    parts = {"text_config": {"model_type": "gpt2"}, "vision_config": WHOLES["internvl"][2]}
    AutoConfig.for_model("internvl", **parts).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="model_type 'gpt2' in the text_config of a internvl"):
        read_config(tmp_path)


def test_a_whole_that_is_quantized_already_is_refused(tmp_path: Path) -> None:
    folder = save(make_whole("smolvlm"), tmp_path)
    change_config(folder, lambda content: content.update(quantization_config={"quant_method": "fp8"}))
    with pytest.raises(UserError, match=r"already quantized \(fp8 in config.json\)"):
        PretrainedFolder.open(folder)
    with pytest.raises(
        UserError, match="has a multimodal model that is quantized already, and test measures"
    ):
        quantized_folder(ModelSettings(str(folder)))


def test_the_tokenizer_has_the_class_that_the_library_takes_for_the_whole(tmp_path: Path) -> None:
    """That of Qwen3.5 splits a text in another way than the one that its file names."""
    folder = save(make_whole("qwen3_5"), tmp_path)
    tokenizer = Qwen3_5Tokenizer(vocab={"a": 0, "b": 1, "<|endoftext|>": 2}, merges=[])
    tokenizer.save_pretrained(folder)
    change_config(folder, lambda content: content.update(tokenizer_class="Qwen2Tokenizer"), TOKENIZER)
    own = PretrainedFolder.open(folder).own_files
    assert own[TOKENIZER]["tokenizer_class"] == "Qwen3_5Tokenizer"
    tokenizer.save_pretrained(folder)  # a file that names it stays as it is
    assert TOKENIZER not in PretrainedFolder.open(folder).own_files
