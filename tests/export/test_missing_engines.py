"""A library or engine that is not installed, or cannot run here, is named."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from aespa_pl.commands.export import export
from aespa_pl.errors import UserError
from aespa_pl.export import engines
from aespa_pl.export import format as formats
from tests.export.folders import card
from tests.export.runs import Known


def missing(*names: str) -> Callable[[str], object]:
    return lambda name: None if name in names else object()


def test_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "find_spec", missing("gguf", "compressed_tensors"))
    for name in ("gguf", "compressed-tensors", "awq"):
        with pytest.raises(UserError, match=r"pip install 'compressed-tensors>=.*' 'gguf>="):
            export("nowhere", format=name)


WITHOUT_EXTRAS = """
import sys
optional = ("gguf", "compressed_tensors", "lm_eval", "xllamacpp", "beartype")
sys.modules.update(dict.fromkeys(optional))  # as if they were not installed
import aespa_pl.commands.application, aespa_pl.commands.compare, aespa_pl.commands.export
import aespa_pl.export.folder
from aespa_pl import quantize
"""


def test_all_but_exports_is_imported_without_their_libraries() -> None:
    """README: where the package is installed without extras, only what needs one refuses."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    # of which these two need none
    assert {"hf", "gptq"} == {name for name, kind in formats.CLASSES.items() if kind.startswith("folder:")}


def test_engine_that_is_not_installed_is_named(
    fresh: Known, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engines, "find_spec", missing("xllamacpp", "vllm"))
    with pytest.raises(UserError, match=r"--verify llama.cpp: xllamacpp is not installed: pip install"):
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
        UserError, match=r"--verify transformers: it cannot run .* here \(AttributeError: no attribute"
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
