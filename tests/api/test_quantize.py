"""The Python call quantizes what is in memory or has a name, on the same path as the command line."""

import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import aespa_pl
from aespa_pl.data.texts import EMBEDDED
from aespa_pl.in_memory import UNFINISHED, keep_model, kept
from aespa_pl.run.journal import model_fingerprint
from aespa_pl.storage.files import write_text
from tests.api.calls import ITERATIONS, SEGMENTS, WORDS, blocks, call, tiny, tokenizer, tokens
from tests.cli.commands import CommandLine
from tests.forks import Forks

SCRIPT = """
import os, sys
before = dict(os.environ)
import aespa_pl
print("torch" in sys.modules, dict(os.environ) == before)
run = aespa_pl.quantize(
    "embedded:llama", method="rtn", bits=4, group_size=16, calibration="embedded",
    evaluation={"texts": "embedded", "max_segments": 1}, trainer={"accelerator": "cpu"},
    **{"data.calibration.segments": 2, "data.calibration.segment_length": 16, "data.cache": "cache"},
)
print(sorted(run.perplexity), all(p["embedded"] > 1 for p in run.perplexity.values()))
print(run.model().config.model_type, run.export("hf", "out", verify="bytes"))
try:
    aespa_pl.quantize("embedded:llama", bit=3)
except aespa_pl.UserError as error:
    print(error)
"""


def test_script_in_an_empty_folder(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0] == "False True"
    assert said[1] == "['nearest', 'original', 'quantized'] True"
    assert f"llama {tmp_path / 'out'}" in said
    assert said[-1] == "bit is unknown: did you mean bits?"
    assert "\x1b" not in done.stderr  # it is no terminal
    assert "run folder: " in done.stderr
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> aespa_pl.QuantizedRun:
    """A run that nothing has interrupted."""
    return call(tmp_path_factory.mktemp("whole"))


def test_a_misspelt_keyword_of_export_is_named(whole: aespa_pl.QuantizedRun) -> None:
    with pytest.raises(aespa_pl.UserError, match=r"^verifi is unknown: did you mean verify\?$"):
        whole.export("hf", verifi="bytes")
    with pytest.raises(aespa_pl.UserError, match=r"^output: .* exists and is not an empty folder"):
        whole.export("hf", whole.folder)


def test_memory_and_files_give_the_same_integers(
    whole: aespa_pl.QuantizedRun, aespa: CommandLine, tmp_path: Path
) -> None:
    """The command line has the same model in a folder that transformers wrote, and the same tokens."""
    from safetensors.torch import save_file  # noqa: PLC0415

    tiny().save_pretrained("model")
    tokenizer().save_pretrained("model")
    save_file({"tokens": tokens()}, "tokens.safetensors")
    status, out, err = aespa(
        "fit", "--model.pretrained", "model", "--data.calibration.source", "tokens.safetensors",
        "--data.calibration.segments", SEGMENTS, "--data.calibration.segment_length", tokens().shape[1],
        "--data.evaluation.texts", "[]", "--data.cache", tmp_path, "--quantization.method", "aespa",
        "--quantization.rounding.iterations", ITERATIONS, "--trainer.accelerator", "cpu",
    )  # fmt: skip
    assert (status, err) == (0, "")
    assert blocks(Path(out.splitlines()[-1])) == blocks(whole.folder)
    given = call(tmp_path, calibration=tokens(1))
    assert blocks(given.folder) != blocks(whole.folder)


def test_texts_in_memory_are_those_of_a_file(tmp_path: Path) -> None:
    text = (EMBEDDED / "heldout.txt").read_text()[:20000]
    (tmp_path / "held.txt").write_text(text)
    given = {"method": "rtn", "calibration": [text], "progress": False}
    segments = {"data.calibration.segments": 2, "data.calibration.segment_length": 32}
    one = call(tmp_path, **given, **segments, evaluation=[text])
    other = call(tmp_path, **given, **segments, evaluation=[str(tmp_path / "held.txt")])
    assert [*one.perplexity["quantized"]] == ["evaluation.jsonl"]
    assert [*other.perplexity["quantized"]] == ["held.txt"]
    for kind in ("original", "quantized"):
        assert [*one.perplexity[kind].values()] == [*other.perplexity[kind].values()]


@pytest.mark.parametrize("when", ["blocks/block_000.safetensors", "walk/*"])
def test_interrupted_it_is_resumed_to_the_same_bytes(
    when: str, whole: aespa_pl.QuantizedRun, forks: Forks, tmp_path: Path
) -> None:
    outcome = forks.run(
        [str(tmp_path)],
        number=signal.SIGINT,
        when=f"{tmp_path}/runs/aespa/version_0/{when}",
        target="tests.api.calls:interrupted",
    )
    assert outcome.status == 0
    found = re.search(r"KeyboardInterrupt: stopped; .*aespa_pl\.resume\('(.*)'\)", outcome.text)
    assert found, outcome.text
    run = aespa_pl.resume(found[1], progress=False)
    assert blocks(run.folder) == blocks(whole.folder)
    assert aespa_pl.resume(run.folder, progress=False, data={"hidden_states": "disk"}).metrics == run.metrics
    with pytest.raises(aespa_pl.UserError, match=r"bits was 2 and is 4.*start a new run with aespa_pl\.quan"):
        aespa_pl.resume(run.folder, bits=4)
    with pytest.raises(aespa_pl.UserError, match=r"evaluation is a keyword of aespa_pl\.quantize alone"):
        aespa_pl.resume(run.folder, evaluation="embedded")
    (run.folder / "blocks" / "block_000.safetensors").unlink()
    for name in ("aespa", "a name of words"):
        (run.folder.parent.parent / "aespa").rename(run.folder.parent.parent / name)
        run = replace(run, folder=run.folder.parent.parent / name / run.folder.name)
        with pytest.raises(aespa_pl.UserError, match=rf"mend it with aespa_pl\.resume\('{run.folder}'\)"):
            run.export("hf")


def test_a_model_that_differs_in_one_weight_is_another(tmp_path: Path) -> None:
    """A fingerprint has the first and the last MiB of a file, and this weight lies between them."""
    config = LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=2, vocab_size=1024)
    model, found = LlamaForCausalLM(config), set()
    for _ in range(2):
        folder = Path(keep_model(tmp_path, model, tokenizer()))
        assert folder == Path(keep_model(tmp_path, model, tokenizer()))
        found.add(model_fingerprint(folder.glob("*.safetensors")))
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight[0, 0] += 1
    assert len(found) == 2


def test_a_model_that_the_library_does_not_save_is_refused(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=16, num_hidden_layers=1))
    model.generation_config.temperature = 0.5  # without do_sample
    with pytest.raises(aespa_pl.UserError, match=r"can't be saved .*correct model.generation_config"):
        keep_model(tmp_path, model, tokenizer())


def test_a_model_with_adapters_is_refused(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=16, num_hidden_layers=1))
    attention: Any = model.model.layers[0].self_attn
    attention.q_proj = torch.nn.ModuleDict({"base_layer": attention.q_proj})  # as peft has it
    with pytest.raises(aespa_pl.UserError, match=r"has adapters: give what their merge_and_unload\(\) ret"):
        keep_model(tmp_path, model, tokenizer())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bit": 3}, r"^bit is unknown: did you mean bits\?$"),
        ({"calibrationn": "c4"}, r"^calibrationn is unknown: did you mean calibration\?$"),
        ({"bits": np.int64(9)}, r"quantization\.bits is 9: expected a whole number from 2 to 8$"),
        ({"bits": torch.tensor([2, 3])}, r"bits is tensor\(\[2, 3\]\): a Tensor with 2 elements cannot"),
        ({"bits_of": {(0, "q_proj"): 3}}, r"bits_of is {\(0, 'q_proj'\): 3}: keys must be str"),
        ({"bits": 9}, r"quantization\.bits is 9: expected a whole number from 2 to 8$"),
        ({"rounding": {"iteration": 9}}, r"rounding\.iteration is unknown: did you mean quantiz"),
        ({"tokenizer": None}, r"tokenizer is missing: give that of the model"),
        ({"calibration": torch.zeros(3)}, r"calibration has the shape \[3\] and the type torch\.fl"),
        ({"calibration": "One line.\nAnother."}, r"give texts in memory as a list of them"),
        ({"calibration": {"source": "a long text " * 99, "segment_length": 9}}, r"File name too long"),
        (
            {"data": {"calibration": {"segments": 100}}},
            r"calibration\.segments is 100, but the keyword calibration gives 4: leave one of them out$",
        ),
        (
            {"calibration": "embedded", "data.calibration.source": "c4"},
            r"source is c4, but .* gives embedded",
        ),
        (
            {"evaluation": "embedded", "data": {"evaluation": {"texts": ["c4"]}}},
            r'texts is \["c4"\], but the k',
        ),
        (
            {"calibration": {"source": "embedded", "segmnts": 4}},
            r"^calibration\.segmnts is unknown: did you mean segments\?$",
        ),
        ({"calibration": object()}, r"calibration is a object: expected the name of a text"),
        ({"calibration": tokens() + WORDS}, r"token id \d+, but the model's vocabulary has 1024"),
        ({"calibration": tokens()[:, :1]}, r"segment_length is 1: expected 2 or more"),
        (
            {"calibration": {"source": Path("no.txt"), "segment_length": 16}},
            r"no\.txt is neither c4, .* nor an existing file",
        ),
        ({"trainer": {"devises": 2}}, r"trainer\.devises is unknown: did you mean trainer\.devices\?$"),
        ({"config": "no.yaml"}, r"there is no file no\.yaml"),
    ],
)
def test_mistakes_are_one_line(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(aespa_pl.UserError, match=message) as error:
        call(tmp_path, **given)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("runs/aespa/version_*"))


def test_a_run_without_progress_loads_its_model_without_a_bar(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = call(tmp_path, method="rtn", progress=False, dtype=torch.bfloat16)
    assert "  dtype: bfloat16\n" in (run.folder / "config.yaml").read_text()
    run.model()
    run.export("hf", verify="bytes")
    assert capfd.readouterr() == ("", "")
    replace(run, progress=True).model()
    assert "Loading weights" in capfd.readouterr().err


def test_a_model_that_is_gone_is_made_again(tmp_path: Path) -> None:
    run = call(tmp_path, method="rtn", progress=False)
    shutil.rmtree(run.folder / "model")
    for read in (run.model, run.tokenizer):
        with pytest.raises(aespa_pl.UserError, match=r"model is gone: aespa_pl\.resume\('.*'\) makes"):
            read()
    assert aespa_pl.resume(run.folder, progress=False).model().config.vocab_size


def test_what_is_no_model_is_refused() -> None:
    nothing: Any = None
    with pytest.raises(
        aespa_pl.UserError, match=r"^model is a NoneType: expected a name, a folder, or a tra"
    ):
        aespa_pl.quantize(nothing)


def test_what_a_killed_process_has_left_unfinished_is_removed(tmp_path: Path) -> None:
    (tmp_path / f"{UNFINISHED}x" / "calibration").mkdir(parents=True)
    (tmp_path / f"{UNFINISHED}x" / "calibration" / "a").write_text("half of")
    folder = kept(tmp_path, "calibration", lambda made: write_text(made / "a", "b"))
    assert (folder / "a").read_text() == "b"
    assert {path.name for path in tmp_path.iterdir()} == {".lock", folder.name}


def test_the_process_keeps_its_settings(tmp_path: Path) -> None:
    torch.set_float32_matmul_precision("high")
    handler = signal.getsignal(signal.SIGINT)
    try:
        call(tmp_path, method="rtn", progress=False)
        assert torch.get_float32_matmul_precision() == "high"
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        torch.set_float32_matmul_precision("highest")


def test_what_is_kept_of_a_text_is_made_again_where_it_is_damaged(tmp_path: Path) -> None:
    """As after a power cut."""
    for _ in range(2):
        folder = kept(tmp_path, "calibration", lambda made: write_text(made / "a", "b"))
        assert (folder / "a").read_text() == "b"
        (folder / "a").write_text("")


def test_a_foreign_run_is_refused_with_what_to_write_in_python(
    whole: aespa_pl.QuantizedRun, tmp_path: Path
) -> None:
    run = tmp_path / "foreign" / "version_0"
    shutil.copytree(whole.folder, run)
    content = yaml.safe_load((run / "config.yaml").read_text())
    content["trainer"]["callbacks"] = [{"class_path": "foreign.Callback"}]
    (run / "config.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(
        aespa_pl.UserError, match=r"names code to run .*: read it, and add trust=True if"
    ) as e:
        aespa_pl.resume(run)
    assert "--" not in str(e.value)


def test_a_configuration_is_read_and_keywords_count_over_it(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    settings = {"quantization": {"bits": 4, "symmetric": True}, "model": {"dtype": "bfloat16"}}
    file.write_text(yaml.safe_dump(settings))
    run = call(tmp_path, config=file, bits=3, dtype="float32", method="rtn", rounding={}, progress=False)
    stored = yaml.safe_load((run.folder / "config.yaml").read_text())
    assert (stored["quantization"]["bits"], stored["quantization"]["symmetric"]) == (3, True)
    assert stored["model"]["dtype"] == "float32"
