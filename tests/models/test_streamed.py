"""Hidden states carried block by block are the library's, and one block at a time is in memory."""

import gc
import weakref
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from aespa_pl.models import family_of
from aespa_pl.models.pretrained import PretrainedFolder
from aespa_pl.models.streamed import StreamedModel
from tests.device.simulated import simulated
from tests.models.examples import every_example, make_ids, make_model, save

BLOCKS = 3
# The stream runs in batches of another size than the library does: sums in another order.
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}


def open_stream(folder: Path, dtype: torch.dtype = torch.float32) -> StreamedModel:
    pretrained = PretrainedFolder.open(folder)
    return StreamedModel.open(pretrained, torch.device("cpu"), dtype)


def make(
    name: str, folder: Path, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, StreamedModel]:
    """Return an example as the library runs it, and its stream."""
    model = make_model(name, dtype)
    return model, open_stream(save(model, folder), dtype)


def embed(source: StreamedModel, ids: Tensor, batch_size: int) -> list[Tensor]:
    batches = source.embed(ids, batch_size)
    assert isinstance(batches, list)  # in memory
    return batches


def loaded(source: StreamedModel) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(source.pretrained.folder)


def library_states(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """Return the embeddings and each block's output, without the norm after the last block."""
    last: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        last.append(output if isinstance(output, Tensor) else output[0])

    block = model.get_submodule(family_of(model.config).blocks_path)[-1]
    handle = block.register_forward_hook(keep)
    states = model(ids, use_cache=False, output_hidden_states=True).hidden_states
    handle.remove()
    assert len(states) == BLOCKS + 1
    return [*states[:BLOCKS], *last]


def real(source: StreamedModel) -> list[bool]:
    """Return which blocks are in memory; each must be so as a whole."""
    found = []
    for block in source.model.get_submodule(source.family.blocks_path):
        kinds = {tensor.is_meta for tensor in block.state_dict().values()}
        assert len(kinds) == 1
        found.append(kinds == {False})
    return found


@every_example
def test_hidden_states_are_the_librarys(name: str, tmp_path: Path) -> None:
    model, source = make(name, tmp_path)
    ids = make_ids(5)
    expected = library_states(model, ids)
    batches = embed(source, ids, 2)
    assert [len(batch) for batch in batches] == [2, 2, 1]
    d = model.config.hidden_size  # behind it a stream may have more
    torch.testing.assert_close(torch.cat(batches)[..., :d], expected[0], **CLOSE)
    assert source.block_count == BLOCKS
    for index, block in enumerate(source.blocks()):
        source.advance(block, batches)
        torch.testing.assert_close(torch.cat(batches)[..., :d], expected[index + 1], **CLOSE)
        assert float((torch.cat(batches)[..., :d] - expected[index]).abs().max()) > 0.1
    with source.stem():
        logits = source.family.head(source.model, torch.cat(batches))
    torch.testing.assert_close(logits, model(ids, use_cache=False).logits, **CLOSE)


@pytest.mark.parametrize("place", ["device", "memory", "disk"])
def test_outputs_wait_where_the_inputs_did(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = make_model("opt", torch.float32), make_ids(3)
    expected, folder = library_states(model, ids)[1], tmp_path / "hidden" if place == "disk" else None
    pretrained = PretrainedFolder.open(save(model, tmp_path))
    with simulated(monkeypatch) as device:
        on_device = place == "device"
        source = StreamedModel.open(pretrained, device, torch.float32, folder, hidden_on_device=on_device)
        batches = source.embed(ids, 2)
        with source.block(0) as block:
            source.advance(block, batches)
        found = [batches[i] for i in range(2)]
        assert all(batch.device == (device if on_device else torch.device("cpu")) for batch in found)
        torch.testing.assert_close(torch.cat([batch.cpu() for batch in found]), expected, **CLOSE)


def test_running_a_block_leaves_its_input(tmp_path: Path) -> None:
    """The statistics and the next block need the same states."""
    model, source = make("opt", tmp_path)
    ids = make_ids(2)
    states = library_states(model, ids)
    hidden = embed(source, ids, 2)[0]
    before = hidden.clone()
    with source.block(0) as block:
        torch.testing.assert_close(source.run_block(block, hidden), states[1], **CLOSE)
    assert torch.equal(hidden, before)


@every_example
def test_only_the_part_in_use_is_in_memory(name: str, tmp_path: Path) -> None:
    source = make(name, tmp_path)[1]

    def in_memory() -> set[str]:
        return {n for n, p in source.model.named_parameters() if not p.is_meta}

    assert in_memory() == set()
    stem = {n for n, _ in source.model.named_parameters()}
    stem -= {n for n in stem if n.startswith(f"{source.family.blocks_path}.")}
    for _ in range(2):  # a head that is tied to the embedding is so again
        with source.stem():
            assert in_memory() == stem
            embedding, head = (
                layer.weight
                for layer in (source.model.get_input_embeddings(), source.model.get_output_embeddings())
            )
            assert (head is embedding) == source.pretrained.config.tie_word_embeddings
        assert in_memory() == set()
    embed(source, make_ids(2), 1)
    assert in_memory() == set()
    for index, block in enumerate(source.blocks()):
        assert in_memory() and not in_memory() & stem  # noqa: PT018
        assert block is source.model.get_submodule(source.family.blocks_path)[index]
        assert real(source) == [i == index for i in range(BLOCKS)]
        assert not any(parameter.requires_grad for parameter in block.parameters())
    assert index == BLOCKS - 1
    assert real(source) == [False] * BLOCKS


def test_memory_of_a_block_is_free_before_the_next_is_read(tmp_path: Path) -> None:
    source = make("llama", tmp_path)[1]
    weights: list[weakref.ref[Tensor]] = []
    for block in source.blocks():
        gc.collect()
        assert all(weight() is None for weight in weights)
        weights.append(weakref.ref(block.get_parameter("mlp.up_proj.weight")))
        assert weights[-1]() is not None


def test_block_is_released_when_the_walk_breaks_off(tmp_path: Path) -> None:
    source = make("opt", tmp_path)[1]
    blocks = source.blocks()
    assert isinstance(blocks, Generator)
    next(blocks)
    next(blocks)
    assert real(source) == [False, True, False]
    blocks.close()
    assert real(source) == [False] * BLOCKS

    blocks = source.blocks()
    assert isinstance(blocks, Generator)
    next(blocks)
    with pytest.raises(KeyboardInterrupt):
        blocks.throw(KeyboardInterrupt())
    assert real(source) == [False] * BLOCKS


def test_a_block_can_be_read_from_another_checkpoint(tmp_path: Path) -> None:
    """The quantized blocks of a continued run are read so; the others are read from the model's own."""
    source = make("opt", tmp_path / "own")[1]
    other, other_source = make("opt", tmp_path / "other")
    ids = make_ids(2)
    hidden = embed(source, ids, 2)[0]
    weights = {}
    for index, pretrained in enumerate((None, other_source.pretrained, None)):
        with source.block(index, pretrained) as block:
            weights[index] = block.get_parameter("fc1.weight").detach().clone()
        assert real(source) == [False] * BLOCKS
    own = loaded(source)
    for index, model in enumerate((own, other, own)):
        expected = model.get_submodule(f"model.decoder.layers.{index}.fc1").weight
        assert torch.equal(weights[index], expected)
    assert not torch.equal(weights[1], own.get_submodule("model.decoder.layers.1.fc1").weight)
    assert torch.equal(embed(source, ids, 2)[0], hidden)  # the stem is the model's own


@pytest.mark.parametrize("name", ["opt", "bloom", "llama"])
def test_blocks_run_in_the_type_that_is_asked_for(name: str, tmp_path: Path) -> None:
    save(make_model(name, torch.float32), tmp_path)
    source = open_stream(tmp_path, torch.bfloat16)
    batches = embed(source, make_ids(3), 2)
    for block in source.blocks():
        assert {parameter.dtype for parameter in block.parameters()} == {torch.bfloat16}
        source.advance(block, batches)
        assert {batch.dtype for batch in batches} == {torch.bfloat16}


def test_states_hold_no_graph(tmp_path: Path) -> None:
    source = make("llama", tmp_path)[1]
    batches = embed(source, make_ids(2), 1)
    for block in source.blocks():
        for parameter in block.parameters():
            parameter.requires_grad_()
        source.advance(block, batches)
        assert not any(batch.requires_grad for batch in batches)
