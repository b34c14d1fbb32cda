"""Each method takes the steps that docs/methods.md describes, and all methods are there."""

import re
from pathlib import Path

import pytest

from aespa_pl.methods import METHODS, Method

OURS = {
    "search", "zfold", "optq", "attention", "polish", "input_correction"
}  # fmt: skip
STEPS = {
    "rtn": set(),
    "optq": {"search", "optq"},
    "zfold": {"search", "zfold", "optq"},
    "boa": {"search", "optq", "optq_rows", "attention"},
    "awq": {"search", "awq"},
    "adaround": {"search", "learn all"},
    "brecq": {"search", "tune_blocks", "rounding", "sublayer"},
    "omniquant": {"tune_blocks", "clipping"},
    "affinequant": {"tune_blocks", "affine"},
    "aespa": OURS | {"learn all", "keep_best"},
    "aespa-hybrid": OURS | {"learn attention", "keep_best"},
    "aespa-fast": OURS | {"keep_best"},
    "aespa-tuned": OURS | {"keep_best", "tune_blocks", "tune_model"},
}
FLAGS = (
    "search", "zfold", "awq", "optq", "optq_rows", "keep_best", "polish", "input_correction",
    "tune_blocks", "tune_model",
)  # fmt: skip


def steps(method: Method) -> set[str]:
    taken = {flag for flag in FLAGS if getattr(method, flag)}
    assert method.query_key == method.value
    taken |= {"attention"} if method.value == "attention" else set()
    taken |= {f"learn {method.learn}"} if method.learn != "none" else set()
    return taken | ({method.parametrization, method.unit} - {"straight-through", "block"})


@pytest.mark.parametrize("name", METHODS)
def test_a_method_takes_the_steps_of_the_table(name: str) -> None:
    assert steps(METHODS[name]) == STEPS[name]


def test_the_page_has_every_method() -> None:
    page = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()
    table = page.partition("| method | grid |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"^\| `([\w-]+)`", table, re.MULTILINE)) == sorted(METHODS)
