"""The model card says what the model is, how it was made, and nothing that was not measured."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from aespa_pl.commands.export import export
from aespa_pl.export.model_card import public_source
from aespa_pl.run.journal import Run
from tests.edited import edited
from tests.export.conftest import MakeRun
from tests.export.folders import card
from tests.export.runs import Known


def card_of(run: Known) -> str:
    """Export a run, and return the text of its model card."""
    export(str(run.folder), format="hf", verify="bytes")
    return card(run.folder / "export" / "hf")[1]


def test_model_card_says_what_it_is_and_how_it_was_made(fresh: Known, tmp_path: Path) -> None:
    (fresh.original / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n")
    export(str(fresh.folder), format="compressed-tensors", output=str(tmp_path / "out"))
    header, text = card(tmp_path / "out")
    made_by = Run.open(fresh.folder).fingerprint["version of aespa-pl"]
    assert header["license"] == "apache-2.0"
    assert "base_model" not in header  # a folder of this machine means nothing to others
    assert str(tmp_path) not in text
    for part in (
        "# original, 4 bits, groups of 32, asymmetric, compressed-tensors",
        f"\noriginal quantized with aespa_pl {made_by}.",
        "Licence of the base model: apache-2.0.",
        "aespa: 4 bits, groups of 32, asymmetric; calibrated on 32 segments of 64 tokens of embedded",
        "| original | 25.730 |",
        "| quantized | 31.134 |",
        "  group_size: 32\n",
        "  bos: ",
        "aespa-pl fit --config settings.yaml --model.pretrained original\n",
        "aespa-pl export last --format compressed-tensors\n",
        "transformers (transformers 5",
        "Beside the original, on a text that comes with aespa_pl: KL ",
    ):
        assert part in text
    load = text.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(load.replace("FOLDER", str(tmp_path / "out")), names)  # as it would be pasted
    assert names["model"].config.model_type == "llama"
    assert "vllm serve" not in text  # it was not run


def test_model_card_of_a_model_from_the_hub(
    fresh: Known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with edited(fresh.folder / "config.yaml") as settings:
        settings["model"]["pretrained"] = "org/name"
    out = tmp_path / "out"
    export(str(fresh.folder), format="hf", output=str(out), verify="bytes", original=str(fresh.original))
    header, text = card(out)
    assert header["base_model"] == "org/name"
    assert "[name](https://huggingface.co/org/name) quantized with aespa_pl" in text
    assert "license" not in header
    assert "Licence of the base model: not stated" in text
    assert "No engine was run" in text


def test_model_card_names_files_of_this_machine_without_their_folders(fresh: Known, tmp_path: Path) -> None:
    text = tmp_path / "mine.jsonl"
    text.write_text("{}")
    with edited(fresh.folder / "config.yaml") as settings:
        settings["data"]["calibration"]["source"] = str(text)
        settings["model"]["pretrained"] = str(fresh.original.rename(tmp_path / "a model"))
    (fresh.folder / "metrics.json").write_text(json.dumps({"perplexity": {"original": {str(text): 25.73}}}))
    content = card_of(fresh)
    assert str(tmp_path) not in content
    for part in (
        "| perplexity, mine.jsonl |",
        "    source: mine.jsonl",
        "tokens of mine.jsonl;",
        "--model.pretrained 'a model'\n",
    ):
        assert part in content


def test_texts_of_a_later_test_are_not_mixed_with_those_of_the_run(fresh: Known) -> None:
    fitted = {"original": {"a": 10.0}, "nearest": {"a": 40.0}, "quantized": {"a": 12.0}}
    later = {"original": {"b": 20.0}, "quantized": {"b": 22.0}}
    (fresh.folder / "metrics.json").write_text(json.dumps({"perplexity": fitted}))
    (fresh.folder / "test.json").write_text(json.dumps({"perplexity": later}))
    table = (
        "|  | perplexity, a | perplexity, b |\n| --- | ---: | ---: |\n"
        "| original | 10.000 | 20.000 |\n| round-to-nearest | 40.000 | - |\n| quantized | 12.000 | 22.000 |\n"
    )
    assert table in card_of(fresh)


def test_perplexities_come_with_their_protocol(fresh: Known) -> None:
    """Its numbers and its settings say the same, so that the card's own command measures the same texts."""
    with edited(fresh.folder / "config.yaml") as settings:
        held_out = {"texts": ["embedded", "/mine/x.txt"], "max_segments": 4, "segment_length": 64}
        settings["data"]["evaluation"] = held_out
    metrics = {
        "perplexity": {"original": {"embedded": 10.0, "x.txt": 20.0, "older": 30.0}},
        "tokens": {"embedded": "(4, 64) 1", "x.txt": "(3, 64) 2"},
    }
    (fresh.folder / "metrics.json").write_text(json.dumps(metrics))
    text = card_of(fresh)
    assert (
        "|\n\nMeasured on 4 segments of 64 tokens of embedded, 3 segments of 64 tokens of x.txt.\n\n" in text
    )
    made_with = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert made_with["data"]["evaluation"] == {
        **held_out,
        "texts": ["embedded", "x.txt"],
        "round_to_nearest": True,
    }


def test_texts_of_one_file_name_keep_columns_of_their_own(fresh: Known) -> None:
    values = {"/a/x.txt": 10.0, "/b/x.txt": 20.0}
    (fresh.folder / "metrics.json").write_text(json.dumps({"perplexity": {"original": values}}))
    text = card_of(fresh)
    assert "|  | perplexity, x.txt | perplexity, x.txt (2) |\n" in text
    assert "| original | 10.000 | 20.000 |\n" in text
    assert public_source({"/a/x.txt": 0.25, "/b/x.txt": 0.75}) == {"x.txt": 0.25, "x.txt (2)": 0.75}


def test_unmeasured_perplexity_is_not_made_up(fresh: Known) -> None:
    (fresh.folder / "metrics.json").write_text(json.dumps({"perplexity": {}}))
    (fresh.folder / "test.json").write_text(json.dumps({"tasks": {}}))  # test without texts
    assert "Not measured." in card_of(fresh)


def test_names_from_a_run_are_text_in_the_card(fresh: Known, tmp_path: Path) -> None:
    """A run of somebody else names its model, its texts and its base model's licence."""
    hostile = "x|<img src=y onerror=alert(1)>\n```\n[z](http://evil) \x1b[2J"
    with edited(fresh.folder / "config.yaml") as settings:
        settings["model"]["pretrained"] = settings["data"]["calibration"]["source"] = hostile
    (fresh.folder / "metrics.json").write_text(json.dumps({"perplexity": {"original": {hostile: 25.73}}}))
    card_of_base = f"---\n{yaml.safe_dump({'license': hostile})}---\n"
    (fresh.original / "README.md").write_text(card_of_base)
    out, original = tmp_path / "out", str(fresh.original)
    export(str(fresh.folder), format="hf", output=str(out), verify="bytes", original=original)
    text = (out / "README.md").read_text().split("---\n", 2)[2]
    prose, _, rest = text.partition("## How it was made")
    assert "<img" not in prose
    assert not re.search(r"(?<!\\)(`|\[z)", prose)
    assert "\x1b" not in text
    assert rest.count("\n```\n") == 2  # only ours end their fences
    table = [line for line in prose.splitlines() if line.startswith("| ")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {3}


def test_a_run_that_needs_no_text_names_none(fresh: Known) -> None:
    with edited(fresh.folder / "config.yaml") as settings:
        settings["quantization"]["method"] = "rtn"
        settings["model"] |= {"dtype": "bfloat16"}
    text = card_of(fresh)
    assert "rtn: 4 bits, groups of 32, asymmetric; not quantized: embedding" in text
    assert "\nmodel:\n  dtype: bfloat16\n  revision: null\n" in text


def test_matrices_of_blocks_that_keep_their_weights_are_named(known: MakeRun) -> None:
    for name, kept in (
        ("glm4-flash", "embedding, head, self_attn.kv_b_proj, mlp.gate, norms."),
        ("qwen3.5", "embedding, linear_attn.conv1d, linear_attn.in_proj_b, linear_attn.in_proj_a, norms."),
        ("llama", "embedding, norms."),
    ):
        assert f"not quantized: {kept}" in card_of(known(name, 4, 32))
