"""See how the loss at the end of a model depends on the output of each of its matrices.

The label of every position is drawn from the model's own distribution. The expected gradient of its cross
entropy is then 0, and the second moment of the gradient is the curvature of the KL divergence from the model:
``KL ~ 1/2 E[(g^T dW x)^2]``, with g the gradient at a matrix's output and x its input (Fisher information).
Forward passes keep the hidden states before each block; the backward pass then takes one block at a time.

Source: Amari, "Natural gradient works efficiently in learning" (1998); the second moments of both sides of a
matrix are those of Martens and Grosse, "Optimizing neural networks with Kronecker-factored approximate
curvature" (ICML 2015). The size of a model is chosen with the diagonal of the gradients' one; integers are
chosen with the gradients' second moment of the rows of a head, ``G = E[g g^T]``, as in Tseng, Sun and De Sa,
"Model-preserving adaptive rounding" (arXiv 2505.22988).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from aespa_pl.calibration.moments import Couplings, Moments
from aespa_pl.calibration.statistics import refuse_not_finite
from aespa_pl.models.family import BlockLayout, Projection
from aespa_pl.models.streamed import StreamedModel
from aespa_pl.models.weights import projection_rows, projection_weight
from aespa_pl.storage.batches import Batches

SEGMENTS, LENGTH = 16, 512
"""Calibration segments, and tokens of each, that the end loss is looked at with."""
TIED_DAMPING = 0.2
"""Damping of the head's H where the head is the embedding as well: errors of an embedding's rows count by
their size alone, for about this share of the head's (0.14 on SmolLM2-135M, 0.5 on a model of 2.2M)."""

POSITIONS = 512
"""Positions of a segment whose logits are in memory at a time."""
TOKENS = 2**14
"""Calibration tokens that G is summed over, at most; the hidden states before all blocks are kept for it."""


@dataclass(frozen=True)
class Seen:
    """Holds what the end loss says of one matrix."""

    block: int | None
    """Number of the block; None of the head and of embeddings."""
    name: str
    """Name of the projection, ``head``, ``embedding`` or another embedding's."""
    weight: Tensor
    """The weight ``[rows, d_in]`` in its own type, only until the next one is asked for."""
    gradients: Tensor
    """Second moments of the gradient per token of the text: of each output ``[rows]``; of an embedding of
    each weight ``[rows, d]``."""
    inputs: Tensor | None
    """``E[x x^T]`` ``[d_in, d_in]`` of its tokens; matrices with one input share it. None: an embedding."""
    tokens: int
    """Number of tokens that it has seen."""
    rows: Tensor | None = None
    """The rows that weight and gradients are of, those of the text's tokens in an embedding; None: all."""


def segments_of(length: int) -> int:
    """Return how many segments of so many tokens G is summed over."""
    return max(1, TOKENS // length)


def end_loss(source: StreamedModel, tokens: Tensor, *, seed: int) -> Iterator[Seen]:
    """Yield every matrix of the model, from the head back to the embedding; a tied one comes as both.

    The ``source`` is the original model. Each of the segments ``[segments, L]`` is a batch; ``seed`` is that
    of the labels. Experts that no token has chosen are left out.
    """
    with source.stem():
        before = _forward(source, tokens)
        head = Moments()
        after = _through_head(source, before.pop(), seed, head)
        count, weight = tokens.numel(), source.model.get_output_embeddings().weight.detach()
        yield Seen(None, "head", weight, head.outputs["head"] / count, head.mean_input("head"), count)
        for index in reversed(range(source.block_count)):
            with source.block(index) as block:
                layout = source.family.layout(source.pretrained.config, index)
                moments = Moments()
                _through_block(source, layout, block, before[index], after, moments=moments)
                for name, projections in _inputs(layout):
                    if name not in moments.inputs:  # of an expert that no token has chosen
                        continue
                    H = moments.mean_input(name)
                    for p in projections:
                        squares = projection_rows(moments.outputs[p.module], layout, p).flatten()
                        weight = projection_weight(block, layout, p)
                        yield Seen(index, p.name, weight, squares / count, H, moments.tokens[name])
            before.pop()
        yield from _of_embeddings(source, tokens, after)


def couplings(
    source: StreamedModel, tokens: Tensor, layouts: Sequence[BlockLayout], *, seed: int
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield the number of each block, from the last one back, with G of the projections that have one.

    ``G [heads, rows, rows]``, in float16, is ``E[g g^T]`` of a projection's outputs, divided by its mean
    diagonal. Model, tokens and seed are as of ``end_loss``; ``layouts`` are those of the blocks.
    """
    with source.stem():
        before = _forward(source, tokens)
        after = _through_head(source, before.pop(), seed)
        for index in reversed(range(source.block_count)):
            with source.block(index) as block:
                moments = Couplings(layouts[index])
                _through_block(source, layouts[index], block, before[index], after, moments=moments)
            before.pop()
            found = {}
            for name in list(moments.outputs):
                G = moments.outputs.pop(name)  # which is gone before the next is copied
                if (mean := G.diagonal(dim1=1, dim2=2).mean()) > 0:
                    found[name] = G.div_(mean).half()
            yield index, found


@torch.no_grad()
def head_input(source: StreamedModel, tokens: Tensor) -> Tensor:
    """Return ``E[x x^T]`` ``[d, d]`` of the head's inputs in the original model; tokens ``[segments, L]``.

    Raises UserError where it is not finite.
    """
    hidden, moments = source.embed(tokens, 1), Moments()
    for block in source.blocks():
        source.advance(block, hidden)
    with source.stem(), _watching({"head": source.model.get_output_embeddings()}) as seen:
        for i in range(len(hidden)):
            source.family.head(source.model, hidden[i].to(source.device))
            moments.add_inputs("head", seen["head"][0])
    H = moments.mean_input("head")
    refuse_not_finite(H, "the head's inputs have", source.dtype)
    return H


def _forward(source: StreamedModel, tokens: Tensor) -> list[Batches]:
    """Return the hidden states before each block, and after the last; each segment is a batch."""
    before = [source.embed_with_stem(tokens, 1)]
    for block in source.blocks():
        last = before[-1]
        outputs = (source.run_block(block, last[i]) for i in range(len(last)))
        before.append(source.keep(outputs))
    return before


def _through_head(
    source: StreamedModel, hidden: Batches, seed: int, moments: Moments | None = None
) -> list[Tensor]:
    """Return the gradients at the last block's output; add the moments of the head, if they are wanted."""
    gradients, module = [], source.model.get_output_embeddings()
    generator = torch.Generator().manual_seed(seed)
    for i in range(len(hidden)):
        pieces = []
        for piece in hidden[i].to(source.device).split(POSITIONS, dim=1):
            inputs = piece.clone().requires_grad_()  # tensors of inference mode can't
            with torch.enable_grad(), _watching({"head": module}) as seen:
                logits = source.family.head(source.model, inputs).float().flatten(0, 1)
                refuse_not_finite(logits.detach(), "the original's logits have", source.dtype)
                drawn = torch.multinomial(logits.detach().softmax(-1).cpu(), 1, generator=generator)[:, 0]
                loss = nn.functional.cross_entropy(logits, drawn.to(logits.device), reduction="sum")
                x, output = seen["head"]
                gradient, of_head = torch.autograd.grad(loss, [inputs, output])
            if moments is not None:
                moments.add_inputs("head", x)
                moments.add_outputs("head", of_head)
            pieces.append(gradient)
        gradients.append(torch.cat(pieces, 1))
    return gradients


def _through_block(
    source: StreamedModel,
    layout: BlockLayout,
    block: nn.Module,
    hidden: Batches,
    gradients: list[Tensor],
    *,
    moments: Moments,
) -> None:
    """Take the gradients from a block's output to its input, in place, and add the moments in it."""
    modules = {p.module: block.get_submodule(p.module) for p in layout.projections}
    block.requires_grad_(requires_grad=False)
    for i in range(len(hidden)):
        inputs = hidden[i].to(source.device).clone().requires_grad_()
        arguments = source.family.arguments(source.model, inputs.detach())
        with torch.enable_grad(), _watching(modules) as seen:
            output = source.family.run_block(block, inputs, arguments)
            wanted = [inputs, *(of_module for _, of_module in seen.values())]
            gradients[i], *of_outputs = torch.autograd.grad(output, wanted, gradients[i])
        for name, value in zip(seen, of_outputs, strict=True):
            refuse_not_finite(value, f"{name}: its gradients have", source.dtype)
            moments.add_outputs(name, value)
        for name, (p, *_) in _inputs(layout):
            if p.module in seen and seen[p.module][0].numel():  # an expert may have got no token
                moments.add_inputs(name, seen[p.module][0])


def _inputs(layout: BlockLayout) -> list[tuple[str, Sequence[Projection]]]:
    """Return the inputs of a block by name, each expert's among them, with the projections that see it."""
    return [pair for group in layout.groups for pair in group.inputs.items()]


@contextmanager
def _watching(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Keep input and output of each module that runs in this context."""
    seen = {}

    def keep(name: str, _module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen[name] = inputs[0].detach(), output

    with ExitStack() as stack:
        for name, module in modules.items():
            stack.callback(module.register_forward_hook(partial(keep, name)).remove)
        yield seen


def _of_embeddings(source: StreamedModel, tokens: Tensor, gradients: list[Tensor]) -> Iterator[Seen]:
    """Yield embeddings; a row's error is the same at all places of its token in a segment."""
    model = source.model
    others = source.family.other_embeddings(model.config)
    tables = {name: model.get_submodule(path) for name, path in others.items()}
    for name, table in {"embedding": model.get_input_embeddings(), **tables}.items():
        module: Any = table
        weight = module.weight
        rows = tokens.unique().to(weight.device)
        sums = torch.zeros(len(rows), weight.shape[1], device=weight.device)
        module.sparse = weight.requires_grad = True  # a dense gradient would be as large as the weight
        padding, module.padding_idx = module.padding_idx, None  # its row would get no gradient
        for ids, gradient in zip(tokens.to(source.device), gradients, strict=True):
            with torch.enable_grad():
                hidden, _ = source.family.embed(source.model, ids[None])
                (of_rows,) = torch.autograd.grad(hidden, [weight], gradient)
            of_rows = of_rows.coalesce()
            places = torch.searchsorted(rows, of_rows.indices()[0])
            sums.index_add_(0, places, of_rows.values().float().square())
        module.sparse, module.padding_idx = False, padding
        weight.requires_grad = False
        yield Seen(None, name, weight.detach()[rows], sums / tokens.numel(), None, tokens.numel(), rows)
