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

from aespa_pl.algorithm.objectives import operand
from aespa_pl.algorithm.second_moments import add_gram
from aespa_pl.calibration.observe import Observation
from aespa_pl.calibration.statistics import Reached, Sums, before_norms, output_shift, rows
from aespa_pl.models.experts import Expert, ExpertMixture, routed
from aespa_pl.models.family import BlockLayout, Projection

WEIGHT, COUNT = "weight ", "count "
"""Prefixes of the sum of an input's squared weights, and of the number of its tokens."""


class ExpertSums:
    """Sums up the statistics of the experts of one block over batches."""

    def __init__(self, layout: BlockLayout, sums: Sums, experts: range, *, magnitudes: bool) -> None:
        """Begin with nothing; ``sums``, the block's, get what is found of the numbers in ``experts``."""
        self.mixture = cast(ExpertMixture, layout.mixture)
        self.sums = sums
        self.magnitudes = magnitudes
        self.first, self.sides = layout.groups[0].name, layout.sides_of(self.mixture.residual)
        self.inputs: dict[str, Projection] = {}  # first projection of each input that experts have
        self.all_tokens: list[str] = []  # names of the groups whose input all tokens are
        for group in layout.groups:
            inputs = {n: p for n, p in group.inputs.items() if not all(one.kept for one in p)}
            of_experts = {n: p[0] for n, p in inputs.items() if p[0].expert in experts}
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
                self.sums.add_magnitude(group, X_all)
        shift = moved = root = None
        if original is not None:
            moved, root = output_shift(seen, original, name, seen.inputs[self.first].shape)
            # a token's experts make up for it together, and for half of it beside a dense network; norms
            # behind them undo the size of their weights
            least = torch.finfo(torch.float32).tiny if self.mixture.norms else 1
            moved /= self.sides * scores.float().sum(1, keepdim=True).clamp(min=least)
            shift = rows(original.inputs[name]) - X_all
        if normed := name in seen.norms:
            root, moved = before_norms(*seen.norms[name], root, moved)
        for input_name, p in self.inputs.items():
            token, place = routed(indices, cast(int, p.expert))
            g = scores[token, place, None].float()  # [T, 1]
            X = rows(seen.inputs[input_name])
            if self.magnitudes:
                self.sums.add_magnitude(input_name, X)
            own, kind = shift, Sums.SHIFT
            weight = counted = g
            if p.residual is not None:
                own, kind = moved, Sums.OUTPUT_SHIFT
                weight = g if root is None else g * root[token]
                counted = weight if normed else g
            self.sums.of(WEIGHT + input_name, X, 1).add_(counted.square().sum())
            self.sums.of(COUNT + input_name, X, 1).add_(len(token))
            self.sums.add_input(input_name, X * weight, kind, None if own is None else own[token] * g)

    def scale(self, tokens: int) -> list[str]:
        """Turn the sums into those of as many ``tokens`` as the whole text has.

        Return the inputs that too few tokens have reached; ``see_all`` completes their Hessians.
        """
        for name in self.inputs:
            weight = float(self.sums.pop(WEIGHT + name))
            count = int(self.sums.pop(COUNT + name))
            share = max(0.0, 1 - count / len(self.sums[Sums.INPUT + name]))
            self.reached[name] = Reached(count, share)
            factor = (1 - share) * (tokens / weight if weight else 0.0)
            for kind in (Sums.INPUT, Sums.SHIFT, Sums.OUTPUT_SHIFT):
                if kind + name in self.sums:
                    self.sums[kind + name].mul_(factor)
            if Sums.MAGNITUDE + name in self.sums:
                self.sums[Sums.MAGNITUDE + name].mul_(tokens / max(count, 1))
        return [name for name, found in self.reached.items() if found.layer_share]

    def see_all(self, block: nn.Module, hidden: Tensor) -> None:
        """Add a batch of the mixture's inputs to the Hessians of inputs with too few tokens.

        It is ``[B, L, d]`` or, of some families, ``[B * L, d]``.
        """
        gram: Tensor | None = None
        for name, found in self.reached.items():
            if not found.layer_share:
                continue
            p, total = self.inputs[name], self.sums[Sums.INPUT + name]
            if p.residual is None:  # the same input for all experts
                if gram is None:
                    gram = torch.zeros_like(total)
                    add_gram(gram, operand(rows(hidden)))
                total.add_(gram, alpha=found.layer_share)
            else:
                expert = cast(Expert, block.get_submodule(p.module.rpartition(".")[0]))
                add_gram(total, operand(rows(expert.inner(hidden))), factor=found.layer_share)

    def clear(self, names: list[str]) -> None:
        """Forget the Hessians of some inputs, which another process has."""
        for name in names:
            self.sums[Sums.INPUT + name].zero_()

    def add_up(self, names: list[str], sum_: Callable[[Tensor], None]) -> None:
        """Add the Hessians of some inputs over all processes, which have seen other tokens each."""
        for name in names:
            sum_(self.sums[Sums.INPUT + name])
