"""What is on disk is complete, whatever goes wrong, and the library loads it."""

import errno
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from aespa_pl.errors import UserError
from aespa_pl.models import family_of
from aespa_pl.models.pretrained import Checkpoint
from aespa_pl.run.model_writer import ModelWriter
from aespa_pl.run.versions import next_version, version_number
from aespa_pl.storage.files import disk_errors, read_json, write_json, write_tensors, write_whole
from tests.models.examples import EXAMPLES, make_ids, make_model, save

every_example = pytest.mark.parametrize("name", EXAMPLES)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def text(content: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text(content)

    return write


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def half_then_full(path: Path) -> None:
    path.write_text("ha")
    full()


def refused(folder: Path, reason: str = "No space left on device") -> Any:
    """Expect a UserError that says what is wrong, where, and what to do."""
    return pytest.raises(
        UserError,
        match=rf"^cannot write to {folder}: .*{reason}.*\. Free space .*--output\.folder$",
    )


@pytest.fixture
def _small_files_only() -> Iterator[None]:
    """Let the system refuse to write more than 64 kB to a file, root's as well."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_file_is_written_into_folders_that_are_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file.txt"
    write_whole(path, text("whole"))
    assert path.read_text() == "whole"
    assert files(path.parent) == ["file.txt"]


def test_old_content_stays_until_the_new_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    seen: list[str] = []

    def write(temporary: Path) -> None:
        assert temporary.parent == tmp_path  # elsewhere it could not be renamed at once
        temporary.write_text("ne")
        seen.append(path.read_text())
        temporary.write_text("new")
        seen.append(path.read_text())

    write_whole(path, write)
    assert seen == ["old", "old"]
    assert path.read_text() == "new"
    assert files(tmp_path) == ["file.txt"]


def test_a_new_file_has_no_name_until_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"

    def write(temporary: Path) -> None:
        temporary.write_text("half")
        assert not path.exists()

    write_whole(path, write)
    assert path.exists()


def test_content_is_on_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, events, replace, fsync = tmp_path / "file.txt", [], Path.replace, os.fsync

    def flush(handle: int) -> None:
        size = os.fstat(handle).st_size
        events.append("folder" if os.path.samestat(os.fstat(handle), tmp_path.stat()) else size)
        fsync(handle)

    def rename(self: Path, target: Path) -> Path:
        events.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(Path, "replace", rename)
    write_whole(path, text("five!"))
    assert events == [5, "rename", "folder"]


@pytest.mark.parametrize("old", [None, "old"])
def test_full_disk_leaves_what_was_there(old: str | None, tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    if old is not None:
        path.write_text(old)
    with refused(tmp_path):
        write_whole(path, half_then_full)
    assert files(tmp_path) == ([] if old is None else ["file.txt"])
    assert old is None or path.read_text() == old


@pytest.mark.parametrize(("owner", "name"), [(os, "fsync"), (Path, "replace")])
def test_disk_that_is_full_only_when_flushed_leaves_what_was_there(
    owner: object, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    monkeypatch.setattr(owner, name, full)
    with refused(tmp_path):
        write_whole(path, text("new"))
    assert path.read_text() == "old"
    assert files(tmp_path) == ["file.txt"]


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt("mine")])
def test_other_failures_pass_through_and_leave_nothing(
    error: BaseException, tmp_path: Path
) -> None:
    def write(temporary: Path) -> None:
        temporary.write_text("half")
        raise error

    with pytest.raises(type(error), match="mine"):
        write_whole(tmp_path / "file.txt", write)
    assert files(tmp_path) == []


def test_what_a_kill_left_is_overwritten_and_gone(tmp_path: Path) -> None:
    names: list[Path] = []

    def write(temporary: Path) -> None:
        names.append(temporary)
        temporary.write_text("whole")

    write_whole(tmp_path / "file.txt", write)
    names[0].write_text("half of something long")
    write_whole(tmp_path / "file.txt", write)
    assert (tmp_path / "file.txt").read_text() == "whole"
    assert files(tmp_path) == ["file.txt"]


def test_file_in_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    for act in (
        lambda: write_json(tmp_path / "runs" / "run" / "metrics.json", {}),
        lambda: next_version(tmp_path / "runs" / "run"),
    ):
        with refused(tmp_path / "runs" / "run", "Not a directory"):
            act()
    with refused(tmp_path / "runs", "File exists"):
        next_version(tmp_path / "runs")


@pytest.mark.usefixtures("_small_files_only")
def test_tensors_that_do_not_fit_leave_nothing(tmp_path: Path) -> None:
    write_tensors(tmp_path / "small.safetensors", {"a": torch.zeros(100)}, {})
    with refused(tmp_path, "File too large"):
        write_tensors(tmp_path / "large.safetensors", {"a": torch.zeros(2**16)}, {})
    assert files(tmp_path) == ["small.safetensors"]


@pytest.mark.usefixtures("_small_files_only")
def test_text_that_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    with refused(tmp_path, "File too large"):
        write_json(tmp_path / "metrics.json", {"text": "x" * 2**17})
    assert files(tmp_path) == []


def test_failures_that_are_not_the_disks_keep_their_type() -> None:
    with pytest.raises(KeyError, match="mine"), disk_errors(Path("runs")):
        raise KeyError("mine")


def test_json_is_read_back(tmp_path: Path) -> None:
    content = {"perplexity": {"c4": 12.5}, "names": ["a", "é"], "none": None}
    write_json(tmp_path / "metrics.json", content)
    written = (tmp_path / "metrics.json").read_text(encoding="utf-8")
    assert json.loads(written) == read_json(tmp_path / "metrics.json") == content
    assert written.endswith("}\n")
    assert len(written.splitlines()) > 3


@pytest.mark.parametrize("content", [b"", b'{"loss": 1', b"\xff\xfe", None])
def test_json_that_cannot_be_read_is_named(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=rf"^{path} cannot be read \(.*\): remove it$"):
        read_json(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_json_does_not_know_is_refused_before_anything_is_lost(
    value: float, tmp_path: Path
) -> None:
    write_json(tmp_path / "metrics.json", {"loss": 1.0})
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "metrics.json", {"loss": value})
    assert json.loads((tmp_path / "metrics.json").read_text()) == {"loss": 1.0}
    assert files(tmp_path) == ["metrics.json"]


def test_tensors_are_read_back_with_their_metadata(tmp_path: Path) -> None:
    whole = torch.arange(12, dtype=torch.float16).view(3, 4)
    tensors = {"view": whole.T, "part": whole[:, 1:3], "bytes": torch.tensor([0, 255]).byte()}
    learned = torch.ones(2, requires_grad=True)
    write_tensors(tmp_path / "x.safetensors", tensors | {"learned": learned}, {"block": "{}"})
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert file.metadata() == {"block": "{}"}
        for name, tensor in tensors.items():
            assert file.get_tensor(name).dtype == tensor.dtype
            assert torch.equal(file.get_tensor(name), tensor)
        assert file.get_tensor("learned").tolist() == [1, 1]


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        ((), 0),
        (("version_0",), 1),
        (("version_0", "version_5"), 6),  # a gap is not filled
        (("version_9", "version_10"), 11),  # numbers, not text
        (("version_3", "version_x", "version_", "version_-7", "other_8"), 4),
    ],
)
def test_next_version_is_above_all(present: tuple[str, ...], expected: int, tmp_path: Path) -> None:
    for name in present:
        (tmp_path / name).mkdir()
    made = next_version(tmp_path)
    assert made == tmp_path / f"version_{expected}"
    assert made.is_dir()
    assert len(files(tmp_path)) == len(present) + 1
    assert version_number(made) == expected


def test_a_version_that_is_a_file_is_taken(tmp_path: Path) -> None:
    (tmp_path / "version_2").write_text("a file")
    assert next_version(tmp_path).name == "version_3"


def test_next_version_makes_the_folder_of_runs(tmp_path: Path) -> None:
    assert next_version(tmp_path / "runs" / "aespa") == tmp_path / "runs" / "aespa" / "version_0"


def test_another_process_that_is_faster_gets_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version_0").mkdir()
    glob = Path.glob

    def then_two_appear(self: Path, pattern: str) -> Iterator[Path]:
        found = list(glob(self, pattern))
        (tmp_path / "version_1").mkdir()
        (tmp_path / "version_2").mkdir()
        return iter(found)

    monkeypatch.setattr(Path, "glob", then_two_appear)
    assert next_version(tmp_path).name == "version_3"


def test_versions_made_at_once_are_different(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(next_version, [tmp_path] * 40))
    assert sorted(version_number(path) for path in made) == list(range(40))


def test_next_version_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "mkdir", full)
    with refused(tmp_path):
        next_version(tmp_path)


def export(
    source: Path, folder: Path, change: Callable[[Tensor], Tensor] = lambda t: t
) -> Checkpoint:
    """Write the model of a folder anew, block by block."""
    checkpoint = Checkpoint.open(source)
    family = family_of(checkpoint.config)
    count = int(checkpoint.config.num_hidden_layers)
    writer = ModelWriter(folder, count)
    names = {0: checkpoint.stem_names(family)}
    writer.write_stem({name: checkpoint.tensor(name) for name in names[0]})
    for index in range(count):
        names[index + 1] = checkpoint.block_names(family, index)
        tensors = {name: change(checkpoint.tensor(name)) for name in names[index + 1]}
        writer.write_block(index, tensors)
        assert writer.block_file(index).is_file()
    assert not (folder / "model.safetensors.index.json").exists()  # not yet a model
    writer.finish(names, source)
    return checkpoint


def load(folder: Path) -> PreTrainedModel:
    """Load a folder with the library, and refuse any tensor missing or left over."""
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


@every_example
def test_library_loads_what_was_written(name: str, tmp_path: Path) -> None:
    model, ids = make_model(name, torch.float32), make_ids()
    export(save(model, tmp_path / "source"), tmp_path / "export")
    loaded = load(tmp_path / "export")
    assert type(loaded) is type(model)
    state = model.state_dict()
    for key, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, state.pop(key))
    assert not state
    assert loaded.config.to_diff_dict().keys() == model.config.to_diff_dict().keys()
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits
        assert torch.equal(loaded(ids, use_cache=False).logits, expected)
    # and so do we: a block a file, and one for the rest
    again = Checkpoint.open(tmp_path / "export")
    assert {stored.file.name for stored in again.tensors.values()} == {
        f"model-{i:05}-of-00004.safetensors" for i in range(1, 5)
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_changed_weights_are_the_ones_loaded_in_their_own_type(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model = make_model("llama", dtype)
    export(save(model, tmp_path / "source"), tmp_path / "export", torch.neg)
    loaded = load(tmp_path / "export")
    assert loaded.dtype == dtype
    for key, tensor in loaded.state_dict().items():
        expected = model.state_dict()[key]
        assert torch.equal(tensor, -expected if ".layers." in key else expected)


def test_block_file_holds_its_block_only(tmp_path: Path) -> None:
    checkpoint = export(save(make_model("opt"), tmp_path / "source"), tmp_path / "export")
    writer = ModelWriter(tmp_path / "export", 3)
    for index in range(3):
        with safe_open(writer.block_file(index), framework="pt") as file:
            assert set(file.keys()) == set(
                checkpoint.block_names(family_of(checkpoint.config), index)
            )
            assert file.metadata() == {"format": "pt"}


def test_tokenizer_and_generation_settings_are_taken_along(tmp_path: Path) -> None:
    source = save(make_model("opt", torch.float32), tmp_path / "source")
    (source / "generation_config.json").write_text('{"max_new_tokens": 17}')
    export(source, tmp_path / "export")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert tokenizer(["w3", "w17"])["input_ids"] == [[3], [17]]
    assert load(tmp_path / "export").generation_config.max_new_tokens == 17


def test_origin_without_generation_settings_is_no_error(tmp_path: Path) -> None:
    source = save(make_model("opt", torch.float32), tmp_path / "source")
    (source / "generation_config.json").unlink()
    export(source, tmp_path / "export")
    assert not (tmp_path / "export" / "generation_config.json").exists()
    load(tmp_path / "export")


def test_disk_that_fills_at_the_end_leaves_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(make_model("opt", torch.float32), tmp_path / "source")
    monkeypatch.setattr(shutil, "copyfile", full)
    with refused(tmp_path / "export"):
        export(source, tmp_path / "export")
    assert not (tmp_path / "export" / "model.safetensors.index.json").exists()


def test_files_beside_the_weights_are_the_originals_byte_for_byte(tmp_path: Path) -> None:
    source = save(make_model("llama", torch.float32), tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    rope = config.pop("rope_parameters")  # transformers 5 writes this, engines on 4 want that:
    config |= {"rope_theta": rope["rope_theta"], "torch_dtype": "float32"}
    written = {
        "config.json": json.dumps(config).encode(),
        "tokenizer.model": b"\x00\x01",
        "merges.txt": b"#version: 0.2\r\n",
        "vocab.json": b"{}",
        "special_tokens_map.json": b'{ "bos_token":"<s>"}',
        "chat_template.jinja": b"{{ messages }}",
        "additional_chat_templates/tools.jinja": b"{{ tools }}",
        "LICENSE": b"do as you like",
    }
    for name, content in written.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(content)
    (source / "train.py").write_text("not the model's")
    export(source, tmp_path / "export")
    for name, content in written.items():
        assert (tmp_path / "export" / name).read_bytes() == content
    assert not (tmp_path / "export" / "train.py").exists()
    assert load(tmp_path / "export").config.rope_parameters == rope
