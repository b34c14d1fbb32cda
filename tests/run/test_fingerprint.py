"""A run goes on with the same inputs only, and names all that differ."""

import json
from pathlib import Path
from typing import Any

import pytest

from aespa_pl.errors import UserError
from aespa_pl.run.journal import MEBIBYTE, Run, differences, model_fingerprint
from tests.run.journals import FINGERPRINT, make_file


def test_run_with_the_same_inputs_goes_on(run: Run) -> None:
    Run.open(run.folder).refuse_changes(FINGERPRINT)


def test_all_that_differs_is_listed(run: Run) -> None:
    now: dict[str, Any] = {
        "model": "b" * 64,
        "dtype": "float32",
        "quantization": {"bits": 3, "grid": {"z": 2}},
        "more": 1,
    }
    with pytest.raises(UserError) as caught:
        Run.open(run.folder).refuse_changes(now)
    assert str(caught.value) == (
        f"{run.folder} cannot be continued, because model was aaaaaaaa... and is bbbbbbbb...; "
        "more was None and is 1; quantization.bits was 2 and is 3; quantization.grid.z was 1 and "
        "is 2: restore these, or start a new run without --ckpt_path"
    )


def test_differences_of_equal_fingerprints_are_none() -> None:
    assert differences(FINGERPRINT, json.loads(json.dumps(FINGERPRINT))) == []
    assert differences({"a": {"b": 1}}, {"a": 1}) == ["a was {'b': 1} and is 1"]
    assert differences({"a": None}, {}) == []


@pytest.mark.parametrize("place", ["start", "middle", "end", "name", "length"])
def test_model_fingerprint_sees_other_weights(place: str, tmp_path: Path) -> None:
    content = bytearray(3 * MEBIBYTE)
    path = tmp_path / "a"
    path.write_bytes(content)
    before = model_fingerprint([path])
    assert model_fingerprint([path]) == before
    if place == "name":
        path = path.rename(tmp_path / "b")
    else:
        content[{"start": 0, "middle": len(content) // 2}.get(place, -1)] = place != "length"
        path.write_bytes(bytes(content) + b"\0" * (place == "length"))
    assert model_fingerprint([path]) != before


def test_a_run_knows_its_model(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(3 * MEBIBYTE))
    run = Run.create(tmp_path / "runs", {"model": model_fingerprint([path])})
    assert run.is_of([path])
    path.write_bytes(b"1" * 3 * MEBIBYTE)
    assert not run.is_of([path])


def test_model_fingerprint_does_not_depend_on_the_place_of_the_cache(tmp_path: Path) -> None:
    """Weights out of a pickle lie in the cache, in a folder before or after the model's own."""
    config = make_file(tmp_path / "model" / "config.json", "{}")
    caches = [make_file(tmp_path / name / "pytorch_model.safetensors", "w") for name in "az"]
    first, second = (model_fingerprint({config, weights}) for weights in caches)
    assert first == second


def test_model_fingerprint_does_not_depend_on_the_order(tmp_path: Path) -> None:
    paths = [make_file(tmp_path / name, name) for name in "ab"]
    assert model_fingerprint(paths) == model_fingerprint(reversed(paths))
    assert model_fingerprint(paths) != model_fingerprint(paths[:1])
