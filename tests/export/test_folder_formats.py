"""The formats that are Hugging Face folders hold ``scale * (q - z)``, by readers that are not ours."""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from aespa_pl.errors import UserError
from aespa_pl.export.compressed_tensors import Awq, CompressedTensors
from aespa_pl.export.folder import FolderFormat, Gptq, HuggingFace
from aespa_pl.export.quantized import QuantizedModel
from tests.export.conftest import MakeRun
from tests.export.folders import load, written
from tests.export.runs import CONFIGS, VOCABULARY, Known, make_run, save_original

FAMILIES, GROUP_SIZES = ("llama-block", "opt-block", "bloom-block"), (None, 32, 128)
GRIDS = [*product(FAMILIES[:1], (2, 3, 4, 8), GROUP_SIZES), *((name, 3, 32) for name in FAMILIES[1:])]
ENDS = (
    *("llama-untied", "llama-biased", "llama-uneven", "opt-350m", "qwen2", "qwen3", "mistral"),
    *(
        "granite",
        "granite4",
        "granite4-dense",
        "smollm3",
        "ministral3",
        "fused",
        "gemma2",
        "gemma3",
        "gemma4-small",
        "olmo3",
        "exaone4",
    ),
    *("seed-oss-biased", "glm", "glm4", "ernie4.5", "hunyuan", "lfm2"),
)
"""Models with biases, heads of their own and rows of any width."""


def stored(folder: Path) -> dict[str, Tensor]:
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def logits(model: PreTrainedModel) -> Tensor:
    ids = torch.randint(0, VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        found: Tensor = model(ids, use_cache=False).logits
        return found


def assert_runs_as_known(known: Known, folder: Path) -> None:
    loaded = load(folder, torch.float32)
    parameters = dict(loaded.named_parameters())
    for name in known.matrices:
        assert torch.equal(parameters[name], known.weight(name)), name
    assert torch.equal(logits(loaded), logits(known.model))


@pytest.mark.parametrize(
    ("name", "bits", "group_size"),
    [*GRIDS, *((name, 3, None) for name in ENDS), *(("llama", bits, 32) for bits in (5, 6, 7))],
)
def test_transformers_runs_compressed_tensors_exactly(
    name: str, bits: int, group_size: int | None, known: MakeRun, tmp_path: Path
) -> None:
    run = known(name, bits, group_size)
    written(run.folder, CompressedTensors(), tmp_path)
    assert_runs_as_known(run, tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        *("qwen2-moe", "qwen3-moe", "mixtral", "olmoe", "qwen3-next"),
        *("glm4-moe", "ernie4.5-moe", "hunyuan-moe", "lfm2-moe", "minimax"),
        *("glm4-flash", "deepseek-v2", "deepseek-v3"),
    ],
)
def test_mixtures_of_experts_survive_compressed_tensors(name: str, known: MakeRun, tmp_path: Path) -> None:
    """The library fuses the experts that it reads, so only the logits can be compared."""
    run = known(name, 4, 32, symmetric=True)
    written(run.folder, CompressedTensors(), tmp_path)
    assert torch.equal(logits(load(tmp_path, torch.float32)), logits(run.model))


@pytest.mark.parametrize(("name", "formats"), [("qwen3-moe", "hf or compressed-tensors"), ("gpt-oss", "hf")])
def test_a_format_without_experts_names_those_that_take_them(name: str, formats: str, known: MakeRun) -> None:
    model = QuantizedModel.open(known(name, 4, 32, symmetric=True).folder)
    assert f"Use --format {formats}" in [do for _, do in Awq().obstacles(model)]


@pytest.mark.parametrize(("bits", "container"), [(4, None), (3, 4), (2, None)])
def test_a_symmetric_grid_has_no_zero_points_in_compressed_tensors(
    bits: int, container: int | None, known: MakeRun, tmp_path: Path
) -> None:
    """Engines have their fastest kernels for such files."""
    run = known("llama", bits, 32, symmetric=True)
    written(run.folder, CompressedTensors(container), tmp_path)
    assert not [name for f in tmp_path.glob("*.safetensors") for name in load_file(f) if "zero" in name]
    scheme = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert scheme["config_groups"]["group_0"]["weights"]["symmetric"]
    assert_runs_as_known(run, tmp_path)


@pytest.mark.parametrize("bits", [2, 3])
def test_container_holds_the_same_integers_in_four_bits(bits: int, known: MakeRun, tmp_path: Path) -> None:
    run = known("llama", bits, 32)
    written(run.folder, CompressedTensors(4), tmp_path)
    weights = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert weights["config_groups"]["group_0"]["weights"]["num_bits"] == 4
    assert_runs_as_known(run, tmp_path)


@pytest.mark.parametrize("name", FAMILIES)
def test_folder_in_the_originals_types(name: str, known: MakeRun, tmp_path: Path) -> None:
    run = known(name, 3, 32)
    written(run.folder, HuggingFace(), tmp_path)
    state = run.model.state_dict()
    for key, value in load(tmp_path, torch.float16).state_dict().items():
        assert torch.equal(value, state[key].half()), key


def bits_of(words: Tensor, count: int, bits: int) -> Iterator[int]:
    """Yield integers from a column of int32 words: the first has the lowest bits of the first word."""
    digits = "".join(f"{word % 2**32:032b}"[::-1] for word in words.tolist())  # lowest bit first
    for i in range(count):
        yield int(digits[bits * i : bits * (i + 1)][::-1], 2)


@pytest.mark.parametrize(("name", "bits", "group_size"), GRIDS)
def test_gptq_is_a_stream_of_bits(
    name: str, bits: int, group_size: int | None, known: MakeRun, tmp_path: Path
) -> None:
    run = known(name, bits, group_size)
    written(run.folder, Gptq(), tmp_path)
    tensors = stored(tmp_path)
    for matrix, (q, scale, zero) in run.matrices.items():
        layer = matrix.removesuffix("weight")
        rows, columns = q.shape
        for row in (0, 1, 2, rows - 1):
            assert list(bits_of(tensors[f"{layer}qweight"][:, row], columns, bits)) == q[row].tolist()
        for group, words in enumerate(tensors[f"{layer}qzeros"]):
            assert list(bits_of(words, rows, bits)) == zero[:, group].tolist()
        assert torch.equal(tensors[f"{layer}scales"], scale.T)
        size = group_size or columns
        assert tensors[f"{layer}g_idx"].tolist() == [i // size for i in range(columns)]


@pytest.mark.parametrize(
    ("name", "bits", "container", "group_size"),
    [*product(FAMILIES, (4,), (None,), GROUP_SIZES), ("llama-block", 3, 4, 32), ("llama-block", 2, 4, None)],
)
def test_awq_has_its_order_of_nibbles(
    name: str, bits: int, container: int | None, group_size: int | None, known: MakeRun, tmp_path: Path
) -> None:
    run = known(name, bits, group_size)
    written(run.folder, Awq(container), tmp_path)
    tensors = stored(tmp_path)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    for matrix, (q, scale, zero) in run.matrices.items():
        layer = matrix.removesuffix("weight")
        for packed, values in (("qweight", q.T), ("qzeros", zero.T)):
            words = tensors[layer + packed][: len(values)]
            for nibble, channel in enumerate(order):
                assert torch.equal((words >> (4 * nibble)) % 16, values[:, channel::8].int())
        assert torch.equal(tensors[f"{layer}scales"], scale.T)


def test_packed_weights_take_their_bits(known: MakeRun, tmp_path: Path) -> None:
    """2.0 bits plus scale and zero point; the shape, and GPTQ's list of groups, are less than 5 %."""
    run = known("llama-wide", 2, None)
    for chosen in (CompressedTensors(), Gptq()):
        written(run.folder, chosen, tmp_path / chosen.name)
        tensors = stored(tmp_path / chosen.name)
        for matrix, (q, _, _) in run.matrices.items():
            layer = matrix.removesuffix("weight")
            sizes = {n: t.nbytes * 8 for n, t in tensors.items() if n.startswith(layer)}
            scales = sizes.get(f"{layer}weight_scale") or sizes[f"{layer}scales"]
            ideal = 2 * q.numel() + scales + 2 * len(q)
            extra = sizes.pop(f"{layer}g_idx", 0)  # 32 bits a column: 1 % of 2 bits from 1,600 rows on
            assert ideal <= sum(sizes.values()) < 1.05 * ideal
            assert extra in (0, 32 * q.shape[1])


def test_config_keeps_what_the_original_states_and_its_files_byte_for_byte(
    fresh: Known, tmp_path: Path
) -> None:
    run = fresh
    extra = {"tokenizer.model": b"\x0a\x00binary", "LICENSE": b"a licence"}
    for name, content in extra.items():
        (run.original / name).write_bytes(content)
    written(run.folder, HuggingFace(), tmp_path / "hf")
    written(run.folder, CompressedTensors(), tmp_path / "packed")
    before = json.loads((run.original / "config.json").read_text())
    after = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert after.pop("quantization_config")["ignore"] == ["lm_head"]
    assert list(after.items()) == list(before.items())
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", *extra)
    for folder, files in (("hf", ("config.json", *names)), ("packed", names)):
        for name in files:
            assert (tmp_path / folder / name).read_bytes() == (run.original / name).read_bytes()


def test_layers_outside_the_blocks_are_left_out(known: MakeRun) -> None:
    model = QuantizedModel.open(known("opt-350m", 4, None).folder)
    assert sorted(model.unquantized_linears()) == [
        "lm_head", "model.decoder.project_in", "model.decoder.project_out",
    ]  # fmt: skip


def test_sharded_original_gives_the_same_export(tmp_path: Path) -> None:
    with torch.no_grad():
        source = save_original(CONFIGS["llama-untied"](), tmp_path / "original", "100KB")
        assert len(list(source.glob("*.safetensors"))) > 3
        run = make_run(source, tmp_path / "version_0", 4, 32)
    written(run.folder, CompressedTensors(), tmp_path / "packed")
    assert_runs_as_known(run, tmp_path / "packed")


@pytest.mark.parametrize(
    ("name", "bits", "chosen", "message"),
    [
        ("llama", 3, Awq(), "its integers take 4 bits. Add --container_bits 4"),
        ("llama", 8, Awq(), "it has 4 bits. Use --format compressed-tensors"),
        ("llama", 5, Gptq(), "it has 2, 3, 4 or 8 bits. Use --format compressed-tensors"),
        ("llama-odd", 3, Gptq(), r"q_proj.weight is \[40, 40\].* in multiples of 32 only. Use --format"),
        ("llama", 8, CompressedTensors(4), "8 bits do not fit 4. Leave --container_bits out"),
    ],
)
def test_what_cannot_be_exact_is_refused_with_what_can(
    name: str, bits: int, chosen: FolderFormat, message: str, known: MakeRun
) -> None:
    model = QuantizedModel.open(known(name, bits, None).folder)
    with pytest.raises(UserError, match=rf"--format {chosen.name} cannot hold .*{bits} bits.*{message}"):
        chosen.refuse(model)
