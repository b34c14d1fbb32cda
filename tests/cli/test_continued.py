"""A run is continued and measured only if it is whole and its inputs are the same."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file

from aespa_pl.commands.arguments import Arguments, with_run
from aespa_pl.run.journal import Run
from tests.cli.commands import LAST, NO_TEXTS, CommandLine, Done, small


def test_unfinished_run_is_not_measured(aespa: CommandLine, model: Path, unmeasured: Done) -> None:
    (unmeasured.copied() / "metrics.json").unlink()
    status, _, err = aespa("test", *small(model))
    assert status == 2
    assert "not finished: continue it" in err


def test_run_of_another_model_is_not_measured(aespa: CommandLine, model: Path, unmeasured: Done) -> None:
    unmeasured.copied()
    status, _, err = aespa("test", *small(model), "--model.pretrained", "embedded:llama")
    assert (status, err.count("\n")) == (2, 1)
    assert "made from another model than embedded:llama" in err


def test_run_alone_is_continued_and_measured(
    aespa: CommandLine, finished: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's folder, or any file in it, is enough from another folder, without another key."""
    run = finished.copied("mine").absolute()
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    for path in (run, run / "journal.json"):
        status, out, err = aespa("fit", "--ckpt_path", path)
        assert (status, err) == (0, "")
        assert "finished already" in " ".join(out.split())
    status, out, err = aespa("test", "--ckpt_path", run / "config.yaml")
    assert (status, err) == (0, "")
    assert out.splitlines()[-1] == str(run)
    assert not list(Path().glob("lightning_logs"))


def test_a_run_is_continued_with_its_model_in_another_place(
    aespa: CommandLine, model: Path, finished: Done
) -> None:
    """All other settings are the run's, without the configuration that it was begun with."""
    run = finished.copied("mine")
    moved = Path(shutil.copytree(model, "moved"))
    for command in ("fit", "test"):
        status, _, err = aespa(command, "--ckpt_path", run, "--model.pretrained", moved)
        assert (status, err) == (0, "")
    status, _, err = aespa("fit", "--ckpt_path", run, "--model.pretrained", "embedded:llama")
    assert (status, err.count("\n")) == (2, 1)
    assert "model was" in err


@pytest.mark.parametrize("place", [("--output.name", "other"), ("--output.folder", "elsewhere")])
@pytest.mark.parametrize("command", ["fit", "test"])
def test_a_run_is_not_continued_in_the_place_of_another(
    command: str, place: tuple[str, str], aespa: CommandLine, finished: Done
) -> None:
    run = finished.copied("mine")
    status, out, err = aespa(command, "--ckpt_path", run, *place)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert f"which goes on where it is: leave out {place[0].removeprefix('--')}, or begin a new run" in err
    its_own = ("--output.folder", "lightning_logs", "--output.name", "mine")
    assert aespa(command, "--ckpt_path", run, *its_own)[0] == 0


def test_a_finished_run_says_that_its_perplexity_is_of_other_tokens(
    aespa: CommandLine, finished: Done
) -> None:
    run = finished.copied("mine")
    status, out, err = aespa("fit", "--ckpt_path", run, "--data.evaluation.segment_length", 5)
    assert (status, err) == (0, "")
    command = re.search(r"not measured on these tokens: embedded \(aespa-pl (.*)\)$", out, re.M)
    assert command is not None
    assert command[1] == f"test --ckpt_path {run} --data.evaluation.segment_length 5"
    assert "not measured" not in aespa("fit", "--ckpt_path", run)[1]
    assert aespa(*command[1].split())[0] == 0
    assert "not measured" not in aespa("fit", *command[1].split()[1:])[1]


def test_a_run_is_measured_with_its_own_bits_and_groups(
    aespa: CommandLine, model: Path, unmeasured: Done
) -> None:
    run = unmeasured.copied()
    Path("others.yaml").write_text("quantization: {bits: 4, group_size: 2}")
    same = ("--quantization.symmetric", "false", "--quantization.rounding.iterations", 99)
    others = ("--config", "others.yaml", *same)
    sizes = []
    for words in ((), others):
        status, _, _ = aespa("test", *small(model), *words)
        assert status == 0
        sizes.append(json.loads((run / "test.json").read_text())["size"])
    assert sizes[0] == sizes[1]
    assert 2 < sizes[0]["quantized"]["bits_per_weight"] < 4


def test_a_run_keeps_the_places_of_its_model_its_texts_and_its_cache(
    aespa: CommandLine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path would be looked for in another folder, and then on the hub.

    Only names of files are in the tables, so they are the same from every folder.
    """
    Path("opt").symlink_to(model)
    Path("texts").mkdir()
    Path("texts/held.txt").write_text("the cat sat on the mat and looked at the dog. " * 40)
    Path("embedded").write_text("a file, but embedded means the text that comes with the package")
    texts = ("--data.evaluation.texts", "[texts/held.txt, embedded]")
    places = ("--model.pretrained", "opt", "--data.cache", "cache")
    status, out, _ = aespa("fit", *small(model), *texts, *places)
    assert status == 0
    run = Path(out.splitlines()[-1]).absolute()
    settings = yaml.safe_load((run / "config.yaml").read_text())
    assert settings["model"]["pretrained"] == str(Path("opt").absolute())
    data = settings["data"]
    assert data["evaluation"]["texts"] == [str(Path("texts/held.txt").absolute()), "embedded"]
    assert data["calibration"]["source"] == "embedded"
    assert data["cache"] == str(Path("cache").absolute())
    metrics = json.loads((run / "metrics.json").read_text())
    fitted = metrics["perplexity"]
    assert list(fitted["original"]) == ["held.txt", "embedded"]
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert aespa("fit", "--ckpt_path", run)[0] == 0
    assert aespa("test", "--ckpt_path", run)[0] == 0
    tested = json.loads((run / "test.json").read_text())
    assert tested["perplexity"] == {kind: fitted[kind] for kind in ("original", "quantized")}
    assert tested["tokens"] == metrics["tokens"]
    assert not list(Path().iterdir())


def test_a_quantized_model_is_not_quantized_again(aespa: CommandLine, model: Path, unmeasured: Done) -> None:
    quantized = unmeasured.copied() / "model"
    status, _, err = aespa("fit", *small(model), "--model.pretrained", quantized)
    assert (status, err.count("\n")) == (2, 1)
    assert "quantized already" in err
    assert "give the original to model.pretrained" in err


def test_without_any_run_there_is_nothing_to_measure(aespa: CommandLine) -> None:
    for words in ((), LAST):
        status, _, err = aespa("test", *words)
        assert (status, err.count("\n")) == (2, 1)
        assert "there is no run in lightning_logs: begin with aespa-pl fit, or give the folder" in err


def test_the_run_that_was_continued_last_is_measured_and_continued(
    aespa: CommandLine, finished: Done
) -> None:
    """All of it: its texts and bits were once taken, and the run with the highest number measured."""
    run = finished.copied("mine")
    begun_later = shutil.copytree(run, run.parent / "version_1")
    os.utime(begun_later / "journal.json", (1, 1))
    for words in (("test",), ("test", *LAST), ("fit", *LAST), ("test", "--output.name", "mine")):
        status, out, err = aespa(*words)
        assert (status, err) == (0, "")
        assert Path(out.splitlines()[-1]) == run


def test_a_run_is_named_to_the_command_whose_configuration_is_taken(
    aespa: CommandLine, finished: Done
) -> None:
    run = finished.copied("mine")
    for command, which in (("fit", "last"), ("test", "last"), ("test", "null"), ("fit", str(run))):
        given = with_run(Arguments.read(["--ckpt_path", which]), command)
        assert given.last("config") == str(run / "config.yaml")
        assert given.last("ckpt_path") == str(run)
    new = Arguments.read(["--ckpt_path", "null"])
    assert with_run(new, "fit") == new
    assert aespa("fit", "--ckpt_path", "null")[0] == 2  # a new run, of no model


def test_changed_weights_are_not_measured(aespa: CommandLine, model: Path, unmeasured: Done) -> None:
    shard = sorted((unmeasured.copied() / "model").glob("*.safetensors"))[-1]
    tensors = load_file(shard)
    save_file({name: -tensor for name, tensor in tensors.items()}, shard, {"format": "pt"})
    status, out, err = aespa("test", *small(model))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert re.search(rf"damaged \(missing or changed: .*{shard.name}.*fit --ckpt_path", err)


def test_upgraded_package_does_not_continue_a_run(
    aespa: CommandLine, model: Path, finished: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished.copied()
    monkeypatch.setattr("aespa_pl.__version__", "9.0")
    status, _, err = aespa("fit", *small(model), *LAST)
    assert (status, err.count("\n")) == (2, 1)
    assert re.search(r"version of aespa-pl was \S+ and is 9\.0", err)


def test_model_dtype_may_change_in_a_continued_run(aespa: CommandLine, model: Path) -> None:
    arguments = [*small(model), *NO_TEXTS, "--quantization.method", "aespa-fast"]
    assert aespa("fit", *arguments, "--model.dtype", "bfloat16")[0] == 0
    Path("lightning_logs/aespa/version_0/metrics.json").unlink()
    arguments += ["--model.dtype", "float32", *LAST]
    assert aespa("fit", *arguments)[0] == 0


def test_a_run_is_continued_with_less_free_memory(
    aespa: CommandLine, model: Path, unmeasured: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the end-to-end tuning has the blocks follows from the memory that is free when a run begins."""
    run = unmeasured.copied()
    monkeypatch.setattr("aespa_pl.planning.budget.model_bytes", lambda *_, **__: 10**15)
    status, out, err = aespa("fit", *small(model), *NO_TEXTS, "--ckpt_path", run)
    assert (status, err) == (0, "")
    assert "finished already" in " ".join(out.split())


@pytest.mark.parametrize("branch", [[], ["--model.revision", "branch"]])
def test_a_run_is_continued_with_the_revision_that_it_has_found(
    branch: list[str], aespa: CommandLine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's main may be another commit meanwhile; the hub is replaced by a folder of snapshots."""
    snapshots = Path("snapshots").absolute()
    shutil.copytree(model, snapshots / "first")
    main = "first"
    monkeypatch.setattr(
        "aespa_pl.commands.job.resolve",
        lambda _, revision, **__: snapshots / (main if revision in (None, "branch") else revision),
    )
    arguments = [*small(model), *NO_TEXTS, "--model.pretrained", "org/name"]
    status, out, err = aespa("fit", *arguments, *branch)
    assert (status, err) == (0, "")
    run = Path(out.splitlines()[-1])
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["revision"] == "first"
    main = "second"
    shutil.copytree(model, snapshots / main)
    config = json.loads((model / "config.json").read_text())
    (snapshots / main / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    for words in ((*arguments, *LAST), ("--ckpt_path", run)):
        (run / "metrics.json").unlink()
        status, _, err = aespa("fit", *words)
        assert (status, err) == (0, "")
    status, _, err = aespa("fit", *arguments, *LAST, "--model.revision", main)
    assert status == 2
    assert "model was" in err
    status, _, err = aespa("test", *arguments, "--data.evaluation.texts", "[embedded]")
    assert (status, err) == (0, "")
    # another repository has commits of its own
    asked: list[str | None] = []

    def mirror(_: str, revision: str | None, **__: object) -> Path:
        asked.append(revision)
        return snapshots / "first"

    monkeypatch.setattr("aespa_pl.commands.job.resolve", mirror)
    status, _, err = aespa("fit", "--ckpt_path", run, "--model.pretrained", "org/mirror")
    assert (status, err, asked) == (0, "", [None])


def test_a_run_that_another_process_has_is_not_continued(aespa: CommandLine, finished: Done) -> None:
    run = finished.copied()
    with Run.open(run).locked():
        status, _, err = aespa("fit", "--ckpt_path", run)
    assert (status, err.count("\n")) == (2, 1)
    assert "is in use by another process: wait for it" in err
