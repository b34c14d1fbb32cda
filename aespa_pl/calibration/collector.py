"""Step 1: the four statistics of a block, accumulated over the calibration segments.

All are sums of outer products over tokens, kept in float32 and divided once at the end, so that the
size of the batches does not matter. Each is ``2 / N`` times its sum, N being the number of tokens:
that is the Hessian of the squared error, and what the paper's lambda is weighed against.

Notation as in ``models/family.py``; X is the input of the attention block, ``[d, N]``.

Source: algorithm.md, step 1; Eq. 17 to 22 of the paper.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from aespa_pl.algorithm.products import Precision, multiplying_in, operand
from aespa_pl.algorithm.rotation import rotate_back, through_norm
from aespa_pl.algorithm.second_moments import add_gram, mirror
from aespa_pl.calibration.attention_weighted import attended_inputs
from aespa_pl.calibration.statistics import BlockStatisticTensors
from aespa_pl.models.family import Attention, BlockLayout, InputGroup

InputHook = Callable[[nn.Module, tuple[Tensor, ...]], None]
ObserveAttention = Callable[[Callable[[Attention], None]], AbstractContextManager[None]]
"""Opens a context in which its argument is called with what the block's attention does."""


class StatisticsCollector:
    """Sums up the statistics of one block while batches run through it inside ``watch``."""

    def __init__(
        self,
        layout: BlockLayout,
        *,
        value: bool,
        query_key: bool,
        inputs: bool = True,
        heads: range | None = None,
        precision: Precision = "float32",
    ) -> None:
        """Collect what is asked for.

        Args:
            layout: Of the block.
            value: H_V.
            query_key: G_Q and G_K.
            inputs: The Hessian of each input group.
            heads: Key/value heads whose H_V is collected; None: all.
            precision: Of the products; the sums are float32. TF32 has all bits of the inputs of a model in
                half precision; A X and what is shifted are rounded.
        """
        self.precision: Precision = precision
        self.layout = layout
        self.value = value
        self.query_key = query_key
        self.inputs = inputs
        self.heads = range(layout.key_value_heads) if heads is None else heads
        self.tokens = 0
        self._inputs: dict[str, Tensor] = {}
        self._shifts: dict[str, Tensor] = {}
        self._residual_shifts: dict[str, Tensor] = {}
        self._original_inputs: dict[str, Tensor] = {}
        self._original_residuals: dict[str, Tensor] = {}
        self._residuals: dict[str, Tensor] = {}
        self._original_attention: Attention | None = None
        self._attention = _AttentionSums()

    @contextmanager
    def watch_original(
        self, block: nn.Module, observe_attention: ObserveAttention
    ) -> Iterator[None]:
        """Remember what ``block`` does with one batch of the original model's hidden states.

        The same segments, as the quantized blocks have changed them, must be the next that ``watch``
        sees.
        """

        def remember(attention: Attention) -> None:
            self._original_attention = attention

        with ExitStack() as stack:
            self._hook_inputs(stack, block, partial(_keep, self._original_inputs))
            self._hook_residuals(stack, block, self._original_residuals)
            if self.value:
                stack.enter_context(observe_attention(remember))
            yield

    @contextmanager
    def watch(self, block: nn.Module, observe_attention: ObserveAttention) -> Iterator[None]:
        """Take in everything that runs through ``block`` in this context."""
        with ExitStack() as stack:
            self._hook_inputs(stack, block, self._input_hook)
            if self._original_inputs:
                self._hook_residuals(stack, block, self._residuals)
            if self.value or self.query_key:
                stack.enter_context(observe_attention(self._observe))
            yield

    def add_up(self, sum_: Callable[[Tensor], None], *, counts: bool) -> None:
        """Add to the sums those of other collectors, which have seen other segments.

        Args:
            sum_: Replaces a tensor, in place, by its total over the collectors.
            counts: Whether what this one has seen is part of the total; where another has seen it as
                well, it has only told the shapes.
        """
        sums = self._attention
        everything: list[Tensor | None] = [*self._inputs.values(), *self._shifts.values()]
        everything += [*self._residual_shifts.values(), sums.attended, sums.attended_shift]
        everything += [sums.keys, sums.queries, sums.query_gain, sums.key_gain]
        # a number stands for nothing seen
        seen = [total for total in everything if total is not None and total.dim()]
        for total in seen:
            if not counts:
                with torch.inference_mode():  # in which some of them were made
                    total.zero_()
            sum_(total)
        tokens = torch.tensor(self.tokens if counts else 0, device=seen[0].device)
        sum_(tokens)
        self.tokens = int(tokens)

    def finish(self, norm_weights: tuple[Tensor, Tensor] | None = None) -> BlockStatisticTensors:
        """Return the statistics of all that was taken in; the collector is of no use afterwards.

        Until then only the upper parts of the symmetric sums have a meaning.

        Args:
            norm_weights: Weights ``[d_h]`` of the norms on query and key heads, for a family that
                has them.
        """
        factor = 2 / self.tokens
        sums = self._attention
        keys = queries = None
        everything: list[Tensor | None] = [*self._inputs.values(), *self._shifts.values()]
        everything += [*self._residual_shifts.values(), sums.attended, sums.attended_shift]
        for total in everything:
            if total is not None:
                total.mul_(factor)  # in place: a copy would double the memory
        attended = [] if sums.attended is None else list(sums.attended)
        for total in (*self._inputs.values(), *attended):
            mirror(total)
        if self.query_key:
            keys, queries = sums.keys * factor, sums.queries * factor
            if sums.rotation is not None:
                keys, queries = (rotate_back(G, *sums.rotation) for G in (keys, queries))
            if norm_weights is not None:
                query_weight, key_weight = (weight.float() for weight in norm_weights)
                keys = through_norm(keys, query_weight, sums.query_gain / self.tokens)
                queries = through_norm(queries, key_weight, sums.key_gain / self.tokens)
        return BlockStatisticTensors(
            self._inputs,
            sums.attended,
            keys,
            queries,
            self._shifts,
            sums.attended_shift,
            self._residual_shifts,
        )

    @property
    def _groups(self) -> tuple[InputGroup, ...]:
        """Inputs to look at; the first is the attention's, which H_V needs in any case."""
        return self.layout.groups if self.inputs else self.layout.groups[:1]

    def _hook_inputs(
        self, stack: ExitStack, block: nn.Module, make_hook: Callable[[str], InputHook]
    ) -> None:
        for group in self._groups:
            module = block.get_submodule(group.projections[0].module)
            stack.callback(module.register_forward_pre_hook(make_hook(group.name)).remove)

    def _hook_residuals(self, stack: ExitStack, block: nn.Module, kept: dict[str, Tensor]) -> None:
        for group in self._groups:
            residual = group.projections[0].residual
            if residual is not None:
                module = block.get_submodule(residual)
                hook = _keep(kept, group.name)
                stack.callback(module.register_forward_pre_hook(hook).remove)

    def _input_hook(self, name: str) -> InputHook:
        def hook(_module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            original = self._original_inputs.pop(name, None)
            if self.inputs:
                with multiplying_in(self.precision):
                    self._add_inputs(name, arguments[0], original)
            if name == self.layout.groups[0].name:
                self.tokens += arguments[0][..., 0].numel()
                self._attention_input, self._original_input = arguments[0], original

        return hook

    def _add_inputs(self, name: str, inputs: Tensor, originals: Tensor | None) -> None:
        X = _rows(inputs)
        factor = operand(X, self.precision)
        add_gram(_sum(self._inputs, name, X, X), factor)
        if originals is None:
            return
        shift = operand(_rows(originals) - X, self.precision)
        _sum(self._shifts, name, X, X).addmm_(shift.T, factor)
        if name in self._residuals:
            R, original_R = self._residuals.pop(name), self._original_residuals.pop(name)
            shift = operand(_rows(original_R) - _rows(R), self.precision)
            _sum(self._residual_shifts, name, shift, X).addmm_(shift.T, factor)

    def _observe(self, attention: Attention) -> None:
        with multiplying_in(self.precision):
            self._add_attention(attention)

    def _add_attention(self, attention: Attention) -> None:
        if self.value:
            X, original_X = self._attention_input, self._original_input
            original, self._original_attention = self._original_attention, None
            AX = attended_inputs(attention, X, self.layout, self.heads, self.precision)
            original_AX = None
            if original is not None and original_X is not None:
                original_AX = attended_inputs(
                    original, original_X, self.layout, self.heads, self.precision
                )
            share = self.layout.key_value_heads / self.layout.heads
            self._attention.add_values(AX, original_AX, len(self.heads), share, self.precision)
        if self.query_key:
            self._attention.add_scores(attention, self.layout, self.precision)


def _rows(X: Tensor) -> Tensor:
    """``[B, L, d]`` of any type to ``[B * L, d]`` in float32."""
    return X.flatten(0, -2).float()


def _sum(sums: dict[str, Tensor], name: str, left: Tensor, right: Tensor) -> Tensor:
    """Return the sum ``[columns of left, columns of right]`` of a name; the first time it is zero."""
    if name not in sums:
        sums[name] = _zeros(left, left.shape[-1], right.shape[-1])
    return sums[name]


def _zeros(like: Tensor, *shape: int) -> Tensor:
    """Return a sum to begin with; blocks run in inference mode, but sums are changed outside of it."""
    with torch.inference_mode(mode=False):
        return torch.zeros(shape, dtype=like.dtype, device=like.device)


def _keep(kept: dict[str, Tensor], name: str) -> InputHook:
    """Return a hook that keeps a module's input under a name."""

    def hook(_module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        kept[name] = arguments[0]

    return hook


@dataclass
class _AttentionSums:
    """Running sums of what only the attention knows."""

    attended: Tensor | None = None
    attended_shift: Tensor | None = None
    keys: Tensor = field(default_factory=lambda: torch.zeros(()))
    queries: Tensor = field(default_factory=lambda: torch.zeros(()))
    query_gain: Tensor = field(default_factory=lambda: torch.zeros(()))
    key_gain: Tensor = field(default_factory=lambda: torch.zeros(()))
    rotation: tuple[Tensor, Tensor] | None = None

    def add_values(
        self,
        heads: Iterator[Tensor],
        originals: Iterator[Tensor] | None,
        count: int,
        share: float,
        precision: Precision,
    ) -> None:
        for head, AX in enumerate(heads):
            factor = operand(AX, precision)
            if self.attended is None:
                self.attended = _zeros(AX, count, AX.shape[-1], AX.shape[-1])
            add_gram(self.attended[head], factor, factor=share)
            if originals is not None:
                if self.attended_shift is None:
                    self.attended_shift = _zeros(AX, *self.attended.shape)
                shift = operand(next(originals).sub_(AX), precision)
                self.attended_shift[head].addmm_(shift.T, factor, alpha=share)

    def add_scores(self, attention: Attention, layout: BlockLayout, precision: Precision) -> None:
        shared = layout.heads // layout.key_value_heads
        Q, K = (operand(x.float(), precision) for x in (attention.query, attention.key))
        keys = (K.transpose(-1, -2) @ K).sum(0)  # [n_kv, d_h, d_h]
        queries = (Q.transpose(-1, -2) @ Q).sum(0)  # [n_h, d_h, d_h]
        self.keys = self.keys.to(Q.device) + keys.repeat_interleave(shared, 0)
        self.queries = self.queries.to(Q.device) + queries.unflatten(0, (-1, shared)).mean(1)
        self.rotation = attention.rotation
        if attention.query_inverse_square is not None and attention.key_inverse_square is not None:
            query_gain = attention.query_inverse_square.float().sum((0, 2))
            key_gain = attention.key_inverse_square.float().sum((0, 2))
            self.query_gain = self.query_gain.to(Q.device) + query_gain
            self.key_gain = self.key_gain.to(Q.device) + key_gain
