"""A tiny local task through the real harness; the oracle scores each answer with transformers alone."""

import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from aespa_pl.errors import UserError
from aespa_pl.evaluation.table import result_table
from aespa_pl.evaluation.tasks import change_blocks, find_tasks, measure_tasks, refuse_too_large
from aespa_pl.models.hub import resolve
from aespa_pl.settings import TaskSettings
from tests.models.examples import make_ids, make_model

harness = pytest.mark.skipif(
    find_spec("lm_eval") is None or find_spec("accelerate") is None,
    reason="lm-evaluation-harness is not installed: pip install '.[eval]'",
)
# the harness and its libraries warn about their own affairs
foreign_warnings = pytest.mark.filterwarnings("default")

CPU = torch.device("cpu")
ITEMS = [
    {"ctx": "Once upon a", "endings": [" time", " elephantine quarrel"], "label": 0},
    {"ctx": "The cat sat on the", "endings": [" zzzz qqqq", " mat"], "label": 1},
    {"ctx": "She was very", "endings": [" happy", " sad and sorry and cold"], "label": 1},
    {"ctx": "One day, a little", "endings": [" girl", " xylophone"], "label": 0},
    {"ctx": "They went to the", "endings": [" park to play", " ghjk"], "label": 1},
]
TASK = """\
task: {name}
dataset_path: json
dataset_name: null
dataset_kwargs:
  data_files:
    test: {data}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{ctx}}}}"
doc_to_choice: "{{{{endings}}}}"
doc_to_target: label
target_delimiter: ""
num_fewshot: 0
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1.0
"""


TWO_FILTERS = """\
output_type: generate_until
generation_kwargs: {until: ["."], max_gen_toks: 2}
test_split: test
doc_to_text: "{{ctx}}"
doc_to_target: "right"
filter_list:
  - name: strict
    filter: [{function: regex, regex_pattern: "never", fallback: "right"}, {function: take_first}]
  - name: flexible
    filter: [{function: regex, regex_pattern: "never", fallback: "wrong"}, {function: take_first}]
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""
"""A task whose answers are cut out in two ways, as gsm8k's are."""


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a local task file, whose data are cached in the test's own folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    data = tmp_path / "items.jsonl"
    data.write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    path = tmp_path / "tiny.yaml"
    path.write_text(TASK.format(name="tiny_task_of_this_test", data=data))
    return str(path)


def by_hand(folder: Path, items: list[dict[str, Any]], *, zeroed: bool = False) -> tuple[float, float]:
    """Return the share of items whose right ending is the likeliest, and its standard error."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if zeroed:
        for block in model.model.decoder.layers:
            nn.init.zeros_(block.fc2.weight)
    solved = []
    for item in items:
        scores = []
        for ending in item["endings"]:
            context = tokenizer(item["ctx"])["input_ids"]
            whole = tokenizer(item["ctx"] + ending)["input_ids"]
            with torch.no_grad():
                logs = model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
            scores.append(sum(float(logs[i - 1, whole[i]]) for i in range(len(context), len(whole))))
        solved.append(scores.index(max(scores)) == item["label"])
    mean = sum(solved) / len(solved)
    return mean, math.sqrt(mean * (1 - mean) / (len(solved) - 1))


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_a_change_finds_the_projections_of_each_expert(name: str) -> None:
    model = make_model(name)
    ids = make_ids(2)
    with torch.no_grad():
        before = model(ids).logits
        visited: list[tuple[int, nn.Module]] = []

        def visit(index: int, block: nn.Module) -> None:
            visited.append((index, block.get_submodule("mlp.experts.0.gate_proj")))

        change_blocks(model, visit)
        torch.testing.assert_close(model(ids).logits, before)
        nn.init.zeros_(visited[1][1].get_parameter("weight"))
        assert not torch.equal(model(ids).logits, before)
    assert [index for index, _ in visited] == list(range(len(visited)))


@harness
@foreign_warnings
@pytest.mark.parametrize("limit", [None, 3])
def test_accuracy_is_the_share_of_items_whose_answer_is_likeliest(task: str, limit: int | None) -> None:
    folder = resolve("embedded:opt")
    settings = TaskSettings([task], task_limit=limit, task_batch_size=2)
    found = measure_tasks(folder, find_tasks(settings), settings, device=CPU, dtype=torch.float32)
    mean, error = by_hand(folder, ITEMS[:limit])
    score = found["tiny_task_of_this_test"]
    assert 0 < mean < 1  # otherwise any mistake would look the same
    assert (score["metric"], score["items"]) == ("acc", len(ITEMS[:limit]))
    assert score["value"] == pytest.approx(mean)
    assert score["error"] == pytest.approx(error)


@harness
@foreign_warnings
def test_of_answers_that_are_read_in_two_ways_the_first_counts(task: str) -> None:
    content = Path(task).read_text().partition("output_type")[0]
    Path(task).write_text(content + TWO_FILTERS)
    folder = resolve("embedded:opt")
    settings = TaskSettings([task], task_limit=2)
    found = measure_tasks(folder, find_tasks(settings), settings, device=CPU, dtype=torch.float32)
    score = found["tiny_task_of_this_test"]
    assert (score["metric"], score["value"], score["error"]) == ("exact_match, strict", 1, 0)


@harness
@foreign_warnings
def test_a_changed_model_is_measured_as_changed(task: str) -> None:
    folder = resolve("embedded:opt")
    settings = TaskSettings([task])
    visited = []

    def zero(index: int, block: nn.Module) -> None:
        visited.append(index)
        nn.init.zeros_(block.get_parameter("fc2.weight"))

    found = measure_tasks(
        folder, find_tasks(settings), settings, device=CPU, dtype=torch.float32, change=zero
    )
    assert visited == [0, 1, 2]
    assert found["tiny_task_of_this_test"]["value"] == by_hand(folder, ITEMS, zeroed=True)[0]


@harness
@foreign_warnings
def test_an_unknown_task_is_refused_with_what_is_like_it(task: str) -> None:
    with pytest.raises(UserError, match=r"there is no task arc_esy; .*did you mean arc_easy"):
        find_tasks(TaskSettings(["arc_esy", task]))


@harness
@foreign_warnings
def test_missing_data_of_a_task_is_reported_before_a_model_is_loaded(task: str) -> None:
    Path(task).write_text(TASK.format(name="without_data", data="/nowhere/items.jsonl"))
    with pytest.raises(UserError, match="the data of without_data cannot be had"):
        find_tasks(TaskSettings([task]))


@harness
@foreign_warnings
def test_a_task_without_accuracy_is_refused_before_a_model_is_loaded(task: str) -> None:
    content = Path(task).read_text().replace("metric: acc", "metric: brier_score")
    Path(task).write_text(content)
    with pytest.raises(UserError, match=r"tiny_task_of_this_test has none of the metrics acc_norm"):
        find_tasks(TaskSettings([task]))


GROUP = """\
group: tiny_group_of_this_test
task:
  - tiny_task_of_this_test
{means}
"""
MEANS = "aggregate_metric_list: [{metric: acc, aggregation: mean}]"


@harness
@foreign_warnings
def test_a_group_is_measured_by_its_mean_alone(task: str) -> None:
    group = Path(task).with_name("group.yaml")
    settings = TaskSettings([task, str(group)])
    group.write_text(GROUP.format(means=MEANS))
    assert find_tasks(settings).names[1] == "tiny_group_of_this_test"
    group.write_text(GROUP.format(means=""))
    with pytest.raises(UserError, match="tiny_group_of_this_test has none of the metrics acc_norm"):
        find_tasks(settings)


@harness
@foreign_warnings
@pytest.mark.parametrize("content", [None, "task: [", "- a list", "output_type: multiple_choice"])
def test_a_file_that_is_no_task_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "broken.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=f"{path} is no task file that lm-evaluation-harness can read"):
        find_tasks(TaskSettings([str(path)]))


@harness
@foreign_warnings
def test_a_task_file_runs_no_function_while_it_is_looked_for(task: str) -> None:
    """The data are missing, so that the search ends before the task is loaded."""
    folder = Path(task).parent
    (folder / "code.py").write_text("open('ran', 'w').close()\ndef f(x): return x\n")
    other = folder / "other.yaml"
    other.write_text(TASK.format(name="other", data="x") + "process_docs: !function code.f\n")
    find_tasks(TaskSettings([task]))
    assert not (folder / "ran").exists()
    assert not Path("ran").exists()


def test_without_the_harness_the_user_reads_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    monkeypatch.setitem(__import__("sys").modules, "lm_eval.tasks", None)
    with pytest.raises(UserError, match=r"pip install 'lm-eval"):
        find_tasks(TaskSettings(["arc_easy"]))


@pytest.mark.parametrize("spare", [-1, 0])
def test_a_model_is_refused_exactly_if_it_does_not_fit(monkeypatch: pytest.MonkeyPatch, spare: int) -> None:
    folder = resolve("embedded:llama")
    model = AutoModelForCausalLM.from_pretrained(folder)
    size = 2 * sum(parameter.numel() for parameter in model.parameters())
    monkeypatch.setattr("aespa_pl.evaluation.tasks.free_bytes", lambda _device: size + spare)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_: pytest.fail("it was loaded"))
    if spare < 0:
        with pytest.raises(UserError, match="tasks and packed models need the whole model in memory"):
            refuse_too_large(folder, CPU, torch.float16)
    else:
        refuse_too_large(folder, CPU, torch.float16)


def test_one_table_holds_all_that_was_measured() -> None:
    metrics = {
        "perplexity": {"original": {"text": 10.0}, "quantized": {"text": 12.5}},
        "tasks": {"quantized": {"piqa": {"value": 0.5, "error": 0.012, "metric": "acc"}}},
        "size": {"quantized": {"bits_per_weight": 2.25, "bytes": 1.5e9}},
        "test_seconds": {"original": 3.0, "quantized": 4.0},
    }
    assert result_table(metrics).markdown() == (
        "|  | perplexity, text | piqa, % | bits per quantized weight | size | seconds |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: |\n"
        "| original | 10.000 | - | - | - | 3 |\n"
        "| quantized | 12.500 | 50.0 ± 1.2 | 2.25 | 1.5 GB | 4 |\n"
    )
