"""The Python call quantizes the text model of a multimodal one."""

import json
from pathlib import Path

from transformers import AutoConfig, AutoModelForImageTextToText, LlamaForCausalLM

from tests.api.calls import blocks, call, tiny
from tests.models.test_multimodal import WHOLES


def test_the_text_model_of_a_multimodal_one_is_quantized_as_it_is_alone(tmp_path: Path) -> None:
    """A run and its exports are the text model, with a config.json of its own."""
    alone = tiny()
    parts = {"text_config": alone.config.to_dict(), "vision_config": WHOLES["smolvlm"][-1]}
    around = AutoModelForImageTextToText.from_config(AutoConfig.for_model("smolvlm", **parts))
    around.model.text_model.load_state_dict(alone.model.state_dict())
    around.lm_head.load_state_dict(alone.lm_head.state_dict())
    given = {"method": "rtn", "bits": 4, "group_size": None, "progress": False}
    runs = [call(tmp_path, model, **given) for model in (alone, around)]
    assert blocks(runs[0].folder) == blocks(runs[1].folder)
    assert isinstance(runs[1].model(), LlamaForCausalLM)
    packed = [
        run.export("compressed-tensors", tmp_path / str(number), verify="bytes")
        for number, run in enumerate(runs)
    ]
    one, other = (json.loads((folder / "config.json").read_text()) for folder in packed)
    assert one["quantization_config"] == other["quantization_config"]
    assert other["architectures"] == ["LlamaForCausalLM"]
    assert "\nThe text model of model-" in (packed[1] / "README.md").read_text()
