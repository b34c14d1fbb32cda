"""Sum up the statistics of a mixture's experts: each sees the tokens that are routed to it.

The output of a mixture is ``sum_e g_e E_e(x)``, so an error of expert e counts with the square of its weight:
its Hessian is the mean of ``2 x x^T`` over its tokens with the weights ``g_e^2``. An expert that has seen
fewer tokens T than its input has columns c takes the share ``1 - T / c`` of its Hessian from all tokens. A
shared expert is one more expert, which every token is routed to.

Source: docs/families.md, "Mixtures of experts"; not in the paper.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from aespa_pl.algorithm.massive import token_weights
from aespa_pl.algorithm.objectives import operand
from aespa_pl.algorithm.second_moments import add_gram
from aespa_pl.calibration.observe import Observation
from aespa_pl.calibration.statistics import Reached
from aespa_pl.calibration.sums import INPUT, MAGNITUDE, OUTPUT_SHIFT, SHIFT, Sums, rows, stream
from aespa_pl.models.experts import Expert, ExpertMixture, routed
from aespa_pl.models.family import BlockLayout, Projection

WEIGHT, COUNT = "weight ", "count "
"""Prefixes of the sum of an input's squared weights, and of the number of its tokens."""


class ExpertSums:
    """Sums up the statistics of the experts of one block over batches."""

    def __init__(self, layout: BlockLayout, sums: Sums, experts: range, *, magnitudes: bool) -> None:
        """Begin with nothing; ``sums`` gets what is found.

        Args:
            layout: Layout of a block with a mixture.
            sums: Sums of the block.
            experts: Numbers of the experts.
            magnitudes: Whether the mean absolute value of each input is collected.
        """
        self.mixture = cast(ExpertMixture, layout.mixture)
        self.sums = sums
        self.magnitudes = magnitudes
        self.first = layout.groups[0].name
        self.inputs: dict[str, Projection] = {}
        """First projection of each input that experts have."""
        self.all_tokens: list[str] = []
        """Names of the groups whose input all tokens are."""
        for group in layout.groups:
            of_experts = {n: p[0] for n, p in group.inputs.items() if p[0].expert in experts}
            self.inputs |= of_experts
            if 0 in experts and of_experts and group.name not in group.inputs:
                self.all_tokens.append(group.name)
        self.reached: dict[str, Reached] = {}

    def add(self, seen: Observation, original: Observation | None) -> None:
        """Add one batch; shifts are collected where the ``original`` model has seen it too."""
        scores, indices = cast(tuple[Tensor, Tensor], seen.routing)
        name = self.mixture.module
        X_all = rows(seen.inputs[name])
        if self.magnitudes:
            for group in self.all_tokens:
                total = self.sums.of(MAGNITUDE + group, X_all, X_all.shape[1])
                total.add_(X_all.abs().sum(0), alpha=0.5)  # as of dense inputs
        shift = moved = root = None
        if original is not None:
            shape = seen.inputs[self.first].shape
            target, output = stream(original, name, shape), stream(seen, name, shape)
            root = token_weights(target, output).sqrt().flatten()[:, None]
            moved = (target - output).flatten(0, 1) * root
            if self.mixture.shared_gate is not None:  # all experts of a token make up for it together
                moved /= scores.sum(1, keepdim=True).clamp(min=1)
            shift = rows(original.inputs[name]) - X_all
        for input_name, p in self.inputs.items():
            token, place = routed(indices, cast(int, p.expert))
            g = scores[token, place, None].float()  # [T, 1]
            X = rows(seen.inputs[input_name])
            if self.magnitudes:
                total = self.sums.of(MAGNITUDE + input_name, X, X.shape[1])
                total.add_(X.abs().sum(0), alpha=0.5)
            self.sums.of(WEIGHT + input_name, X, 1).add_(g.square().sum())
            self.sums.of(COUNT + input_name, X, 1).add_(len(token))
            if moved is not None and root is not None and p.residual is not None:
                self._add(input_name, X * (g * root[token]), OUTPUT_SHIFT, moved[token] * g)
            else:
                self._add(input_name, X * g, SHIFT, None if shift is None else shift[token] * g)

    def _add(self, name: str, X: Tensor, kind: str, shift: Tensor | None) -> None:
        factor = operand(X)
        add_gram(self.sums.of(INPUT + name, X, X.shape[1], X.shape[1]), factor)
        if shift is not None:
            total = self.sums.of(kind + name, X, shift.shape[1], X.shape[1])
            total.addmm_(operand(shift).T, factor)

    def scale(self, tokens: int) -> list[str]:
        """Turn the sums into those of as many ``tokens`` as the whole text has.

        Returns:
            The inputs that too few tokens have reached; ``see_all`` completes their Hessians.
        """
        for name in self.inputs:
            weight = float(self.sums.pop(WEIGHT + name))
            count = int(self.sums.pop(COUNT + name))
            columns = len(self.sums[INPUT + name])
            share = max(0.0, 1 - count / columns)
            self.reached[name] = Reached(count, share)
            for kind in (INPUT, SHIFT, OUTPUT_SHIFT):
                if kind + name in self.sums:
                    factor = tokens / weight if weight else 0.0
                    self.sums[kind + name].mul_((1 - share) * factor)
            if MAGNITUDE + name in self.sums:
                self.sums[MAGNITUDE + name].mul_(tokens / max(count, 1))
        return [name for name, found in self.reached.items() if found.layer_share]

    def see_all(self, block: nn.Module, hidden: Tensor) -> None:
        """Add one batch ``[B, L, d]`` of all tokens to the Hessians that too few have reached.

        Args:
            block: The block.
            hidden: Input of the mixture.
        """
        X = rows(hidden)
        gram: Tensor | None = None
        for name, found in self.reached.items():
            if not found.layer_share:
                continue
            p, total = self.inputs[name], self.sums[INPUT + name]
            if p.residual is None:  # the same input for all experts
                if gram is None:
                    gram = torch.zeros_like(total)
                    add_gram(gram, operand(X))
                total.add_(gram, alpha=found.layer_share)
            else:
                expert = cast(Expert, block.get_submodule(p.module.rpartition(".")[0]))
                inner = rows(expert.inner(hidden))
                add_gram(total, operand(inner), factor=found.layer_share)

    def clear(self, names: list[str]) -> None:
        """Forget the Hessians of some inputs, which another process has."""
        for name in names:
            self.sums[INPUT + name].zero_()

    def add_up(self, names: list[str], sum_: Callable[[Tensor], None]) -> None:
        """Add the Hessians of some inputs over all processes, which have seen other tokens each."""
        for name in names:
            sum_(self.sums[INPUT + name])
