"""The command ``export`` writes a folder that is complete and the run's, or none."""

import json
import os
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from jsonargparse import auto_cli
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from aespa_pl.commands.arguments import note_own
from aespa_pl.commands.export import PARTIAL, export
from aespa_pl.errors import UserError
from aespa_pl.export import format as formats
from aespa_pl.export.folder import HuggingFace
from aespa_pl.models.pretrained import PretrainedFolder
from aespa_pl.run.journal import model_fingerprint
from tests.disks import leave_free
from tests.edited import edited
from tests.export.conftest import MakeRun
from tests.export.folders import files
from tests.export.runs import Known


def test_command_line_writes_a_folder_and_tells_about_it(
    fresh: Known, capsys: pytest.CaptureFixture[str]
) -> None:
    auto_cli(export, args=[str(fresh.folder), "--format", "compressed-tensors"], as_positional=True)
    folder = fresh.folder / "export" / "compressed-tensors"
    assert files(folder) >= {
        "README.md", "config.json", "model.safetensors.index.json", "tokenizer.json",
        "model-00001-of-00003.safetensors",
    }  # fmt: skip
    said = capsys.readouterr().out
    table = {line.split("│")[1].strip(): line.split("│")[2:-1] for line in said.splitlines() if "│" in line}
    weights = sum(q.numel() for q, _, _ in fresh.matrices.values())
    row = [cell.strip() for cell in table["quantized matrices"]]
    assert row[0] == f"{weights:,}"
    # 4 bits, and for each 32 columns a scale of 32 bits and a zero point of 4; shapes are the rest
    assert 4 + 36 / 32 <= float(row[1]) < 4 + 36 / 32 + 0.02
    assert [cell.strip() for cell in table["embedding and head"]][1] == "16.000"
    assert "read back by compressed-tensors: equal to the run, bit for bit" in said
    assert "transformers: transformers 5" in said
    assert "logits equal" in said
    assert said.splitlines()[-1] == str(folder)


def test_last_run_is_found(fresh: Known, tmp_path: Path) -> None:
    runs = tmp_path / "runs" / "mine"
    runs.mkdir(parents=True)
    shutil.move(fresh.folder, runs / "version_3")
    other = runs.parent / "other" / "version_9"
    other.mkdir(parents=True)
    (other / "journal.json").write_text("{}")
    os.utime(other / "journal.json", (1, 1))  # older
    export("last", format="hf", verify="bytes", runs_folder=str(runs.parent))
    assert (runs / "version_3" / "export" / "hf" / "README.md").is_file()
    with pytest.raises(UserError, match=r"there is no run in .*third: begin with aespa-pl fit"):
        export("last", format="hf", runs_folder=str(runs.parent), name="third")


def test_the_cache_of_the_run_is_used(fresh: Known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights out of pickles and tokens lie there already; the default may be on a full disk."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "default"))
    (weights,) = fresh.original.glob("*.safetensors")
    torch.save(load_file(weights), fresh.original / "pytorch_model.bin")
    weights.unlink()
    cache = tmp_path / "cache"
    pretrained = PretrainedFolder.open(fresh.original, cache)
    (converted,) = {tensor.file for tensor in pretrained.tensors.values()}
    with edited(fresh.folder / "journal.json") as journal:
        journal["fingerprint"]["model"] = model_fingerprint({fresh.original / "config.json", converted})
    with edited(fresh.folder / "config.yaml") as settings:
        settings["data"]["cache"] = str(cache)
    note_own(fresh.folder)
    export(str(fresh.folder), format="hf", verify="transformers")
    assert {path.name for path in cache.iterdir()} == {"weights", "tokens"}
    assert [path.name for path in (tmp_path / "default" / "aespa_pl").iterdir()] == ["own_configurations"]


def test_every_format_from_the_command(fresh: Known, tmp_path: Path) -> None:
    for name in get_args(formats.FormatName):
        export(str(fresh.folder), format=name, output=str(tmp_path / name), verify="bytes")
    assert files(tmp_path / "gguf") == {"model.gguf", "README.md"}


def test_code_beside_a_model_is_not_passed_on(fresh: Known, tmp_path: Path) -> None:
    (fresh.original / "tokenizer_x.py").write_text("print()")
    export(str(fresh.folder), format="hf", output=str(tmp_path / "out"), verify="bytes")
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert not list((tmp_path / "out").glob("*.py"))


def test_output_that_is_not_empty_is_refused_before_the_run_is_read(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").write_text("mine")
    (tmp_path / "journal.json").touch()
    with pytest.raises(UserError, match=r"--output: .*out exists and is not an empty folder"):
        export(str(tmp_path), format="hf", output=str(tmp_path / "out"))


def test_empty_output_is_used(fresh: Known, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export(str(fresh.folder), format="hf", output=str(tmp_path / "out"), verify="bytes")
    assert (tmp_path / "out" / "README.md").is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "hf", "embedding": "q8_0"}, "--embedding q8_0 is of --format gguf only"),
        ({"format": "gguf", "container_bits": 4}, "--container_bits is of compressed-tensors, awq"),
        ({"format": "ggul"}, "--format is 'ggul': expected one of .*gguf"),
        ({"format": "gptq", "container_bits": 5}, "--container_bits is 5: expected one of"),
        ({"format": "gguf", "embedding": "q4"}, "--embedding is 'q4': expected one of"),
        ({"format": "gguf", "verify": "vllm"}, "does not read --format gguf: choose llama.cpp or"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        export("nowhere", **options)


def test_full_disk_is_refused_before_anything_is_written(
    fresh: Known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_free(monkeypatch, 1000)
    with pytest.raises(UserError, match=r"has [\d.]+ K?B free, but .* more are needed: .* with --output"):
        export(str(fresh.folder), format="hf", output=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_export_that_is_not_the_run_is_not_kept(
    fresh: Known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise UserError("differs")

    monkeypatch.setattr("aespa_pl.commands.export.prove", fail)
    with pytest.raises(UserError, match="differs"):
        export(str(fresh.folder), format="gguf", output=str(tmp_path / "out" / "gguf"))
    assert not (tmp_path / "out" / "gguf").exists()


def test_export_again_after_a_kill(fresh: Known, tmp_path: Path) -> None:
    left = tmp_path / "out" / "hf" / PARTIAL
    left.mkdir(parents=True)
    (left / "model-00009-of-00009.safetensors").write_text("half")
    (left / "lock").touch()
    export(str(fresh.folder), format="hf", output=str(tmp_path / "out" / "hf"), verify="bytes")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["hf"]
    assert "model-00009-of-00009.safetensors" not in files(tmp_path / "out" / "hf")


def test_two_exports_to_one_folder_do_not_meet(fresh: Known, tmp_path: Path) -> None:
    output = str(tmp_path / "out")
    write = HuggingFace.write

    def and_another(*given: Any) -> None:
        with pytest.raises(UserError, match=r"another export is writing to .*out: wait for it"):
            export(str(fresh.folder), format="gptq", output=output, verify="bytes")
        write(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HuggingFace, "write", and_another)
        export(str(fresh.folder), format="hf", output=output, verify="bytes")
    assert (tmp_path / "out" / "README.md").is_file()
    assert PARTIAL not in files(tmp_path / "out")


def test_the_current_folder_is_an_output(
    fresh: Known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    export(str(fresh.folder), format="hf", output=".", verify="bytes")
    assert {"README.md", "config.json"} < files(Path.cwd())
    assert not Path(PARTIAL).exists()
    assert AutoModelForCausalLM.from_pretrained(Path.cwd()).config.model_type == "llama"


@pytest.mark.parametrize(
    "content", [b"[]", b"{", b'{"perplexity": 3}', b"\xff\xfe", b'{"perplexity": {"quantized": {"a": "b"}}}']
)
def test_damaged_measurements_do_not_end_an_export(
    fresh: Known, tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("metrics.json", "test.json"):
        (fresh.folder / name).write_bytes(content)
    (fresh.original / "README.md").write_bytes(b"---\n\xff\xfe\n---\n")
    export(str(fresh.folder), format="hf", output=str(tmp_path / "out"), verify="bytes")
    assert "Not measured." in (tmp_path / "out" / "README.md").read_text()
    assert "metrics.json is damaged" in caplog.text
    assert caplog.text.count("test.json is damaged") == 1  # though the card is made twice


def test_bits_are_those_of_the_journal_and_hold_every_integer(fresh: Known, tmp_path: Path) -> None:
    """config.yaml may be edited after the run; the journal says what the blocks hold."""
    file = fresh.folder / "journal.json"
    with edited(file) as journal, edited(fresh.folder / "config.yaml") as settings:
        journal["fingerprint"]["quantization"] = settings["quantization"]
        settings["quantization"] = {**settings["quantization"], "bits": 8, "group_size": None}
    export(str(fresh.folder), format="gptq", output=str(tmp_path / "out"), verify="bytes")
    packed = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (packed["bits"], packed["group_size"]) == (4, 32)
    with edited(file) as journal:
        journal["fingerprint"]["quantization"]["bits"] = 3
    with pytest.raises(UserError, match=r"integers or zero points up to 15 do not have 3 bits"):
        export(str(fresh.folder), format="hf", output=str(tmp_path / "three"), verify="bytes")


def test_exports_are_the_same_bytes_each_time(known: MakeRun, tmp_path: Path) -> None:
    run = known("llama", 4, 32)
    for name in ("gguf", "gptq"):
        folders = [tmp_path / f"{name}{i}" for i in range(2)]
        for folder in folders:
            export(str(run.folder), format=name, output=str(folder), verify="bytes")
        first, second = ({f: (d / f).read_bytes() for f in files(d)} for d in folders)
        assert first == second


def test_an_export_that_was_killed_while_its_files_moved_is_written_again(
    fresh: Known, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    export(str(fresh.folder), format="hf", output=str(out), verify="bytes")
    expected = files(out)
    (out / "config.json").unlink()
    (out / ".aespa-pl.partial").mkdir()
    (out / ".aespa-pl.partial" / "config.json").touch()
    (out / ".aespa-pl.partial" / "format").write_text("hf")
    with pytest.raises(UserError, match="is not an empty folder"):
        export(str(fresh.folder), format="gguf", output=str(out), verify="bytes")
    export(str(fresh.folder), format="hf", output=str(out), verify="bytes")
    assert files(out) == expected
