"""``aespa-pl export``: what a user sees, what is refused, and what an interruption leaves."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from jsonargparse import auto_cli

from aespa_pl.commands import export as command
from aespa_pl.commands.export import export
from aespa_pl.errors import UserError
from aespa_pl.export import engines, formats, proof
from tests.export.conftest import MakeRun
from tests.export.runs import Known


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


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
    table = {
        line.split("│")[1].strip(): line.split("│")[2:-1]
        for line in said.splitlines()
        if "│" in line
    }
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
    export("last", format="hf", verify="bytes", output_folder=str(runs.parent))
    assert (runs / "version_3" / "export" / "hf" / "README.md").is_file()
    with pytest.raises(UserError, match=r"no run in .*third: correct --output_folder"):
        export("last", format="hf", output_folder=str(runs.parent), output_name="third")


def test_every_format_from_the_command(fresh: Known, tmp_path: Path) -> None:
    for name in get_args(formats.FormatName):
        export(str(fresh.folder), format=name, output=str(tmp_path / name), verify="bytes")
    assert files(tmp_path / "gguf") == {"model.gguf", "README.md"}


def test_output_that_is_not_empty_is_refused_before_the_run_is_read(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").write_text("mine")
    with pytest.raises(UserError, match=r"--output: .*out exists and is not an empty folder"):
        export("nowhere", format="hf", output=str(tmp_path / "out"))


def test_empty_output_is_used(fresh: Known, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export(str(fresh.folder), format="hf", output=str(tmp_path / "out"), verify="bytes")
    assert (tmp_path / "out" / "README.md").is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "hf", "embedding": "q8_0"}, "--embedding q8_0 is of --format gguf only"),
        ({"format": "gguf", "container_bits": 4}, "--container_bits is of compressed-tensors, awq"),
        ({"format": "gguf", "verify": "vllm"}, "does not read --format gguf: choose llama.cpp or"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        export("nowhere", **options)


def missing(*names: str) -> Callable[[str], object]:
    return lambda name: None if name in names else object()


def test_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "find_spec", missing("gguf", "compressed_tensors"))
    for name in ("gguf", "compressed-tensors", "awq"):
        with pytest.raises(
            UserError, match=r"needs the library .*: pip install 'aespa-pl\[export\]'"
        ):
            export("nowhere", format=name)


def test_hf_and_gptq_need_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are imported where gguf and compressed-tensors are not installed."""
    for name in [name for name in sys.modules if name.startswith("aespa_pl.")]:
        if name.startswith(("aespa_pl.export", "aespa_pl.commands.export")):
            monkeypatch.delitem(sys.modules, name)
    for name in ("gguf", "compressed_tensors"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("commands.export", "export.hf", "export.gptq"):
        import_module(f"aespa_pl.{name}")
    with pytest.raises(ModuleNotFoundError):
        import_module("aespa_pl.export.gguf")
    assert {"hf", "gptq"} == formats.CLASSES.keys() - formats.LIBRARIES.keys()


def test_engine_that_is_not_installed_is_named(
    fresh: Known, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engines, "find_spec", missing("xllamacpp", "vllm"))
    with pytest.raises(
        UserError, match=r"--verify llama.cpp: xllamacpp is not installed: pip install"
    ):
        export(str(fresh.folder), format="gguf", verify="llama.cpp")
    export(str(fresh.folder), format="gguf")
    assert "llama.cpp: not checked, not installed" in capsys.readouterr().out


def test_engine_that_cannot_run_here_is_told_apart_from_one_that_differs(
    fresh: Known, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As vLLM's CPU build on a processor that it has no kernel for."""

    def fail(*_: object) -> None:
        raise AttributeError("no attribute\n'cpu_gemm_wna16'")

    monkeypatch.setattr(engines.Transformers, "logits", fail)
    with pytest.raises(
        UserError,
        match=r"--verify transformers: it cannot run .* here \(AttributeError: no attribute",
    ):
        export(str(fresh.folder), format="hf", verify="transformers")
    assert not (fresh.folder / "export" / "hf").exists()
    monkeypatch.setattr(engines, "find_spec", missing("vllm"))
    export(str(fresh.folder), format="hf")
    said = capsys.readouterr().out
    assert "transformers: not checked, it failed (AttributeError: no attribute 'cpu_gemm" in said
    assert "No engine was run" in card(fresh.folder / "export" / "hf")[1]


def test_model_larger_than_the_memory_is_not_run_unasked(
    fresh: Known, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Little:
        available = 1000

    monkeypatch.setattr("psutil.virtual_memory", Little)
    export(str(fresh.folder), format="hf")
    assert "transformers: not checked, the whole model takes" in capsys.readouterr().out


def test_full_disk_is_refused_before_anything_is_written(
    fresh: Known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        free = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda _: Full())
    with pytest.raises(UserError, match=r"--output: the disk of .* has 0.0 GB free"):
        export(str(fresh.folder), format="hf", output=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_export_that_is_not_the_run_is_not_kept(
    fresh: Known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise UserError("differs")

    monkeypatch.setattr(proof, "_refuse_difference", fail)
    with pytest.raises(UserError, match="differs"):
        export(str(fresh.folder), format="gguf", output=str(tmp_path / "out" / "gguf"))
    assert list((tmp_path / "out").iterdir()) == []


def test_export_again_after_a_kill(fresh: Known, tmp_path: Path) -> None:
    left = tmp_path / "out" / ".hf.partial"
    left.mkdir(parents=True)
    (left / "model-00009-of-00009.safetensors").write_text("half")
    export(str(fresh.folder), format="hf", output=str(tmp_path / "out" / "hf"), verify="bytes")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["hf"]
    assert "model-00009-of-00009.safetensors" not in files(tmp_path / "out" / "hf")


class Hub:
    """Stands in for the hub's client."""

    calls: list[tuple[str, object]]
    known = True

    def __init__(self) -> None:
        Hub.calls = getattr(Hub, "calls", [])

    def whoami(self) -> None:
        if not self.known:
            raise OSError("401")

    def create_repo(self, name: str, *, exist_ok: bool) -> None:
        Hub.calls.append(("create", (name, exist_ok)))

    def upload_folder(self, *, folder_path: Path, repo_id: str) -> None:
        if repo_id == "me/broken":
            raise OSError("no network")
        Hub.calls.append(("upload", (files(folder_path), repo_id)))


def test_folder_is_pushed(
    fresh: Known,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "HfApi", Hub)
    Hub.calls = []
    out = tmp_path / "out"
    export(
        str(fresh.folder), format="gguf", output=str(out), verify="bytes", push_to_hub="me/small"
    )
    assert Hub.calls == [
        ("create", ("me/small", True)),
        ("upload", ({"model.gguf", "README.md"}, "me/small")),
    ]
    assert "pushed to https://huggingface.co/me/small" in capsys.readouterr().out


def test_upload_that_fails_leaves_the_folder(
    fresh: Known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "HfApi", Hub)
    out = tmp_path / "out"
    with pytest.raises(
        UserError, match=r"me/broken cannot be uploaded .no network.*complete in .*out"
    ):
        export(
            str(fresh.folder),
            format="gguf",
            output=str(out),
            verify="bytes",
            push_to_hub="me/broken",
        )
    assert (out / "model.gguf").is_file()


def test_push_without_login_is_refused_before_anything_is_written(
    fresh: Known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hub, "known", False)
    monkeypatch.setattr(command, "HfApi", Hub)
    with pytest.raises(
        UserError, match=r"--push_to_hub me/small: the hub does not know who you are"
    ):
        export(str(fresh.folder), format="hf", output=str(tmp_path / "out"), push_to_hub="me/small")
    assert not (tmp_path / "out").exists()


def card(folder: Path) -> tuple[dict[str, Any], str]:
    _, header, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(header), text


def test_model_card_says_what_it_is_and_how_it_was_made(fresh: Known, tmp_path: Path) -> None:
    (fresh.original / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n")
    export(str(fresh.folder), format="compressed-tensors", output=str(tmp_path / "out"))
    header, text = card(tmp_path / "out")
    assert header["license"] == "apache-2.0"
    assert "base_model" not in header  # a folder of this machine means nothing to others
    assert str(tmp_path) not in text
    for part in (
        "# original, 4 bits, groups of 32, asymmetric, compressed-tensors",
        "Licence of the base model: apache-2.0.",
        "aespa: 4 bits, groups of 32, asymmetric; calibrated on 32 segments of 64 tokens of embedded",
        "| original | 25.730 |",
        "| quantized | 31.134 |",
        "  group_size: 32\n",
        "aespa-pl fit --config settings.yaml --model.pretrained original\n",
        "aespa-pl export last --format compressed-tensors\n",
        "transformers (transformers 5",
    ):
        assert part in text
    assert "vllm serve" not in text  # it was not run


def test_model_card_of_a_model_from_the_hub(
    fresh: Known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = yaml.safe_load((fresh.folder / "config.yaml").read_text())
    settings["model"]["pretrained"] = "org/name"
    (fresh.folder / "config.yaml").write_text(yaml.safe_dump(settings))
    out = tmp_path / "out"
    export(
        str(fresh.folder),
        format="hf",
        output=str(out),
        verify="bytes",
        original=str(fresh.original),
    )
    header, text = card(out)
    assert header["base_model"] == "org/name"
    assert "license" not in header
    assert "Licence of the base model: not stated" in text
    assert "No engine was run" in text


def test_model_card_names_files_of_this_machine_without_their_folders(
    fresh: Known, tmp_path: Path
) -> None:
    text = tmp_path / "mine.jsonl"
    text.write_text("{}")
    settings = yaml.safe_load((fresh.folder / "config.yaml").read_text())
    settings["data"]["calibration"]["source"] = str(text)
    (fresh.folder / "config.yaml").write_text(yaml.safe_dump(settings))
    (fresh.folder / "metrics.json").write_text(
        json.dumps({"perplexity": {"original": {str(text): 25.73}}})
    )
    export(str(fresh.folder), format="hf", output=str(tmp_path / "out"), verify="bytes")
    _, content = card(tmp_path / "out")
    assert str(tmp_path) not in content
    for part in ("| mine.jsonl |", "    source: mine.jsonl", "tokens of mine.jsonl;"):
        assert part in content


def test_unmeasured_perplexity_is_not_made_up(fresh: Known, tmp_path: Path) -> None:
    (fresh.folder / "metrics.json").write_text(json.dumps({"perplexity": {}}))
    (fresh.folder / "test.json").write_text(json.dumps({"tasks": {}}))  # test without texts
    export(str(fresh.folder), format="hf", output=str(tmp_path / "out"), verify="bytes")
    assert "Not measured." in card(tmp_path / "out")[1]


def test_exports_are_the_same_bytes_each_time(known: MakeRun, tmp_path: Path) -> None:
    run = known("llama", 4, 32)
    for name in ("gguf", "gptq"):
        folders = [tmp_path / f"{name}{i}" for i in range(2)]
        for folder in folders:
            export(str(run.folder), format=name, output=str(folder), verify="bytes")
        first, second = ({f: (d / f).read_bytes() for f in files(d)} for d in folders)
        assert first == second
