"""Rows are read and make documents as the protocols of the paper say."""

import gzip
import json
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest

from aespa_pl.data import texts
from aespa_pl.data.texts import CALIBRATION_KEY, EVALUATION_KEY, Text, are_names, find_text, short_names
from aespa_pl.errors import UserError

NAMED = ["c4", "wikitext2", "ptb"]
calibration_text = partial(find_text, key=CALIBRATION_KEY)
evaluation_text = partial(find_text, key=EVALUATION_KEY)
READERS = {"calibration": calibration_text, "evaluation": evaluation_text}


def documents(text: Text) -> list[Any]:
    found = text.documents()
    return [found[i] for i in range(len(found))]


def test_evaluation_on_c4_joins_the_first_1100_documents(hub: Any) -> None:
    hub.rows = {"text": [f"d{i}" for i in range(1200)]}
    text = evaluation_text("c4")
    assert documents(text) == [" ".join(f"d{i}" for i in range(1100))]
    assert text.protocol.max_segments == 256
    assert hub.calls == [
        {
            "path": "allenai/c4",
            "data_files": {"validation": "en/c4-validation.00000-of-00008.json.gz"},
            "split": "validation",
        }
    ]


@pytest.mark.parametrize(("purpose", "split"), [("calibration", "train"), ("evaluation", "test")])
def test_ptb_is_one_document_of_sentences_joined_by_spaces(hub: Any, purpose: str, split: str) -> None:
    hub.rows = {"sentence": ["a b", "c"]}
    assert documents(READERS[purpose]("ptb")) == ["a b c"]
    assert hub.calls == [
        {
            "path": "ptb-text-only/ptb_text_only",
            "data_files": {split: f"penn_treebank/{split}/0000.parquet"},
            "split": split,
            "revision": "refs/convert/parquet",
        }
    ]


@pytest.fixture
def hub_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders are laid out as the repositories are; the real ``load_dataset`` prefers them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")

    c4 = tmp_path / "allenai/c4/en"
    c4.mkdir(parents=True)
    splits = "configs: [{config_name: en, data_files: [{split: train, path: en/c4-train.*}]}]"
    (c4.parent / "README.md").write_text(f"---\n{splits}\n---\n")
    for shard in ["train.00000-of-01024", "train.00001-of-01024", "validation.00000-of-00008"]:
        row = {"text": shard, "timestamp": "2019-04-25T12:57:54Z", "url": "u"}
        (c4 / f"c4-{shard}.json.gz").write_bytes(gzip.compress(json.dumps(row).encode()))

    for split in ["train", "test"]:
        ptb = tmp_path / f"ptb-text-only/ptb_text_only/penn_treebank/{split}/0000.parquet"
        wikitext = tmp_path / f"Salesforce/wikitext/wikitext-2-raw-v1/{split}-00000.parquet"
        for path, field in [(ptb, "sentence"), (wikitext, "text")]:
            path.parent.mkdir(parents=True, exist_ok=True)
            datasets.Dataset.from_dict({field: [split, "end"]}).to_parquet(path)
    splits = ", ".join(
        f"{{split: {split}, path: wikitext-2-raw-v1/{split}-*}}" for split in ["train", "test"]
    )
    (tmp_path / "Salesforce/wikitext/README.md").write_text(
        f"---\nconfigs: [{{config_name: wikitext-2-raw-v1, data_files: [{splits}]}}]\n---\n"
    )


@pytest.mark.usefixtures("hub_on_disk")
def test_datasets_finds_the_files_we_ask_for() -> None:
    assert {name: documents(calibration_text(name)) for name in NAMED} == {
        "c4": ["train.00000-of-01024"],
        "wikitext2": ["train\n\nend"],
        "ptb": ["train end"],
    }
    assert {name: documents(evaluation_text(name)) for name in NAMED} == {
        "c4": ["validation.00000-of-00008"],
        "wikitext2": ["test\n\nend"],
        "ptb": ["test end"],
    }


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("Couldn't reach 'it' on the Hub (LocalEntryNotFoundError)\nmore"),
        RuntimeError("Dataset scripts are no longer supported, but found c4.py"),
        StopIteration(),
        OSError(28, "No space left on device"),
    ],
)
@pytest.mark.parametrize(
    ("purpose", "source", "message"),
    [
        (
            "calibration",
            "c4",
            "data.calibration.source: cannot load allenai/c4 from the Hugging Face hub (WHY); give "
            "the path of a local copy instead: c4-train.00000-of-01024.json.gz",
        ),
        (
            "calibration",
            "ptb",
            "data.calibration.source: cannot load ptb-text-only/ptb_text_only from the Hugging "
            "Face hub (WHY); give the path of a local copy instead: ptb.train.txt",
        ),
        (
            "evaluation",
            "wikitext2",
            "data.evaluation.texts: cannot load Salesforce/wikitext from the Hugging Face hub "
            "(WHY); give the path of a local copy instead: a .txt with the test split's rows joined by "
            "blank lines",
        ),
        (
            "evaluation",
            "ptb",
            "data.evaluation.texts: cannot load ptb-text-only/ptb_text_only from the Hugging Face "
            "hub (WHY); give the path of a local copy instead: ptb.test.txt",
        ),
    ],
)
def test_a_failing_hub_is_one_line_with_the_way_out(
    hub: Any, caplog: pytest.LogCaptureFixture, error: Exception, purpose: str, source: str, message: str
) -> None:
    hub.error = error
    text = READERS[purpose](source)
    with pytest.raises(UserError) as caught:
        text.documents()
    why = (str(error) or type(error).__name__).splitlines()[0]
    assert str(caught.value) == message.replace("WHY", why)
    assert "asking the Hugging Face hub for" in caplog.text  # which may take half a minute


def test_a_hub_data_set_without_its_field_is_a_user_error(hub: Any) -> None:
    hub.rows = {"body": ["a"]}
    with pytest.raises(UserError, match="cannot load Salesforce/wikitext"):
        evaluation_text("wikitext2").documents()


def test_a_hub_text_is_identified_without_the_hub(hub: Any) -> None:
    hub.error = ConnectionError()
    identities = {
        json.dumps(read(name).identity, sort_keys=True) for read in READERS.values() for name in NAMED
    }
    assert len(identities) == 6
    assert hub.calls == []


def test_local_rows_are_documents_for_calibration_and_one_for_evaluation(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\n"}\n{"text": "b"}\n')
    assert documents(calibration_text(str(path))) == ["a\n", "b"]
    assert documents(evaluation_text(str(path))) == ["a\n\n\nb"]


def test_a_local_txt_is_one_document_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a\n\n b \n")
    assert documents(calibration_text(str(path))) == ["a\n\n b \n"]
    assert documents(evaluation_text(str(path))) == ["a\n\n b \n"]


@pytest.mark.parametrize("purpose", READERS)
def test_a_local_ptb_file_means_what_ptb_means(tmp_path: Path, hub: Any, purpose: str) -> None:
    hub.rows = {"sentence": ["a <unk> b", "c"]}
    path = tmp_path / "ptb.test.txt"
    path.write_text(" a <unk> b \n c \n")
    read = READERS[purpose]
    assert documents(read(str(path))) == documents(read("ptb"))


@pytest.mark.parametrize("purpose", READERS)
def test_the_local_copy_of_wikitext2_that_is_advised_means_what_wikitext2_means(
    tmp_path: Path, hub: Any, purpose: str
) -> None:
    hub.rows = {"text": ["", " = A = \n", "b"]}
    path = tmp_path / "rows.txt"
    path.write_text("\n\n".join(hub.rows["text"]))
    assert documents(READERS[purpose](str(path))) == documents(READERS[purpose]("wikitext2"))


def test_a_local_c4_shard_means_what_c4_means(tmp_path: Path, hub: Any) -> None:
    rows = [f"d{i}" for i in range(1200)]
    hub.rows = {"text": rows}
    path = tmp_path / "c4-validation.00000-of-00008.json.gz"
    content = "\n".join(json.dumps({"text": row, "url": "u"}) for row in rows)
    path.write_bytes(gzip.compress(content.encode()))
    local, remote = evaluation_text(str(path)), evaluation_text("c4")
    assert documents(local) == documents(remote)
    assert local.protocol == remote.protocol
    assert documents(calibration_text(str(path))) == documents(calibration_text("c4"))


def test_the_embedded_texts_come_with_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "calibration.txt").write_text("to learn é", encoding="utf-8")
    (tmp_path / "heldout.txt").write_text("to test\n", encoding="utf-8")
    monkeypatch.setattr(texts, "EMBEDDED", tmp_path)
    assert documents(calibration_text("embedded")) == ["to learn é"]
    assert documents(evaluation_text("embedded")) == ["to test\n"]


def test_the_identity_of_a_file_follows_its_content_not_its_place(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ["a.txt", "b.txt", "c.txt"]]
    for path, content in zip(paths, ["same", "same", "other"], strict=True):
        path.write_text(content)
    a, b, c = (evaluation_text(str(path)).identity for path in paths)
    assert a == b
    assert a != c


def test_the_same_bytes_read_in_another_way_are_another_text(tmp_path: Path) -> None:
    identities = []
    for name in ["a.txt", "ptb.test.txt", "a.jsonl", "c4-validation.jsonl"]:
        (tmp_path / name).write_text('{"text": "a"}\n')
        identities.append(evaluation_text(str(tmp_path / name)).identity)
    identities += [
        calibration_text(str(tmp_path / name)).identity for name in ["a.txt", "ptb.test.txt", "a.jsonl"]
    ]
    # calibration and evaluation read a .txt and a ptb file alike
    assert identities[4:6] == identities[:2]
    different = [*identities[:4], identities[6]]
    assert all(a != b for i, a in enumerate(different) for b in different[:i])


@pytest.mark.parametrize(
    ("purpose", "key"), [("calibration", "data.calibration.source"), ("evaluation", "data.evaluation.texts")]
)
def test_a_wrong_name_is_refused_with_the_setting_it_stands_in(purpose: str, key: str) -> None:
    with pytest.raises(UserError, match=f"^{key}: c5 is neither"):
        READERS[purpose]("c5")


def test_tables_name_files_without_their_folders_unless_another_text_has_the_name() -> None:
    sources = ["c4", "/texts/held.txt", "ptb.test.txt", "own/c4", "a/same.txt", "b/same.txt", "embedded"]
    names = ["c4", "held.txt", "ptb.test.txt", "own/c4", "a/same.txt", "b/same.txt", "embedded"]
    assert short_names(sources) == dict(zip(sources, names, strict=True))


def test_texts_without_white_space_are_no_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("語").touch()
    for name in ("c4", "no/such.txt", "~/本.txt", "語", tmp_path / "本 "):
        assert are_names([name])
    for text in ("今天天气很好。", "本" * 300, "a" * 256, "two words"):
        assert not are_names([text])
