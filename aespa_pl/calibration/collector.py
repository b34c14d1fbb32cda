"""Accumulate the statistics of a block over the calibration segments (step 1).

All are sums of outer products over tokens, kept in float32 and multiplied by ``2 / N`` once at the end,
so that the size of the batches does not matter. Notation as in ``models/family.py``; X is the input of the
attention block, ``[d, N]``, and ``A X`` that of a value head, weighted by its attention probabilities A.

Source: docs/algorithm.md, step 1; Eq. 17 to 22 of the paper.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from aespa_pl.algorithm.objectives import Precision, multiplying_in, operand
from aespa_pl.algorithm.second_moments import mirror, rotate_back, through_norm
from aespa_pl.calibration.attended import AttendedInputs, stride
from aespa_pl.calibration.experts import ExpertSums
from aespa_pl.calibration.observe import Observation
from aespa_pl.calibration.statistics import (
    BlockStatistics,
    Hessian,
    Shifts,
    Sums,
    before_norms,
    output_shift,
    rows,
)
from aespa_pl.models.family import BlockLayout, InputGroup, Projection
from aespa_pl.models.observed import Attention, Rotation

ATTENDED, ATTENDED_SHIFT, GATE = "attended", "attended shift", "gate"
KEYS, QUERIES, QUERY_GAIN, KEY_GAIN = "keys", "queries", "query gain", "key gain"


class StatisticsCollector:
    """Sums up the statistics of one block over batches."""

    def __init__(
        self,
        layout: BlockLayout,
        *,
        value: bool,
        query_key: bool,
        inputs: bool = True,
        magnitudes: bool = False,
        heads: range | None = None,
        experts: range | None = None,
        precision: Precision = "float32",
        value_tokens: int = 0,
        text: int = 0,
    ) -> None:
        """Begin with nothing.

        The ``value`` statistic is H_V, of some key/value ``heads`` (None: all), ``query_key`` are G_Q and
        G_K, ``inputs`` the Hessians of inputs but those of experts, whose are of some ``experts`` (None:
        all), ``magnitudes`` the mean absolute values of inputs. In ``precision`` are the products; the sums
        are float32. TF32 has all bits of the inputs of a model in half precision; A X and differences of two
        streams are rounded. H_V is summed over all tokens; above 0, ``value_tokens`` says how many for each
        column are enough, of a calibration ``text`` of so many tokens.
        """
        self.layout = layout
        self.value = value
        self.query_key = query_key
        self.inputs = inputs
        self.magnitudes = magnitudes
        self.heads = range(layout.key_value_heads) if heads is None else heads
        self.precision: Precision = precision
        self.value_tokens, self.text = value_tokens, text
        # a norm that comes after them (OLMo), not before (OPT-350M, whose stream is a norm's output)
        starts = {p.residual for group in layout.groups for p in group.projections if p.norms}
        self._raw = {group.name for group in layout.groups if group.projections[0].module in starts}
        self.tokens = 0
        self._sums = Sums()
        self.experts: ExpertSums | None = None
        if layout.mixture is not None and (experts is None or experts):
            experts = experts or range(layout.mixture.total)
            self.experts = ExpertSums(layout, self._sums, experts, magnitudes=magnitudes)
        self._rotation: Rotation | None = None

    def add(self, seen: Observation, original: Observation | None = None) -> None:
        """Add one batch; shifts are collected where the ``original`` model has seen it too."""
        with multiplying_in(self.precision):
            for group in self.layout.groups if self.inputs else ():
                for name, projections in group.inputs.items():
                    if projections[0].expert is None and not all(p.kept for p in projections):
                        self._add_inputs(name, projections[0], seen, original)
            if self.experts is not None:
                self.experts.add(seen, original)
            if self.value and seen.attention is not None:
                self._add_values(seen, original)
            if self.query_key and seen.attention is not None:
                self._add_scores(seen.attention)
        self.tokens += seen.inputs[self.layout.groups[0].name][..., 0].numel()

    def add_up(self, sum_: Callable[[Tensor], None], *, counts: bool) -> None:
        """Add the sums of other collectors: ``sum_`` replaces a tensor, in place, by its total over them.

        Where another has seen the same segments, this one counts nothing and has only the shapes.
        """
        if not self._sums:  # of a pass whose experts are all kept
            return
        for total in self._sums.values():
            if not counts:
                total.zero_()
            sum_(total)
        tokens = torch.tensor(self.tokens if counts else 0, device=total.device)
        sum_(tokens)
        self.tokens = int(tokens)

    def finish(self, norm_weights: tuple[Tensor, Tensor | None] | None = None) -> BlockStatistics:
        """Return the statistics of all batches; the collector hands its memory over to them.

        The norms on query and key heads, where there are any, have weights as ``Family.norm_weights``.
        """
        sums, self._sums = self._sums, Sums()
        for total in sums.values():
            total.mul_(2 / self.tokens)  # in place: a copy would double the memory
        sums.take_mean_weights()
        inputs = sums.named(Sums.INPUT)
        attended = sums.get(ATTENDED)
        for total in (*inputs.values(), *(() if attended is None else attended)):
            mirror(total)
        if GATE in sums and ATTENDED_SHIFT in sums:
            # H_V has the mean of the squared gates of a head, and each row of the shift its own
            gates = sums[GATE]
            ratio = torch.where(gates > 0, gates.mean(1, keepdim=True) / gates, 0)
            sums[ATTENDED_SHIFT].mul_(ratio[..., None])
        shifts = Shifts(sums.named(Sums.SHIFT), sums.named(Sums.OUTPUT_SHIFT), sums.get(ATTENDED_SHIFT))
        return BlockStatistics(
            {name: Hessian(total[None]) for name, total in inputs.items()},
            None if attended is None else Hessian(attended),
            self._before_rotation(sums, KEYS, QUERY_GAIN, 0, norm_weights),
            self._before_rotation(sums, QUERIES, KEY_GAIN, 1, norm_weights),
            shifts if shifts.inputs or shifts.outputs or shifts.attended is not None else None,
            self.tokens,
            sums.named(Sums.MAGNITUDE),
            {} if self.experts is None else self.experts.reached,
        )

    def _add_inputs(
        self, name: str, first: Projection, seen: Observation, original: Observation | None
    ) -> None:
        X = rows(seen.inputs[name])
        if self.magnitudes:
            self._sums.add_magnitude(name, X)
        kind, shift, root = Sums.SHIFT, None, None
        if original is not None and name in seen.outputs:
            shift, root = output_shift(seen, original, name, seen.inputs[self.layout.groups[0].name].shape)
            # experts beside a dense network make up for it as well
            shift, kind = shift.div_(self.layout.sides_of(cast(str, first.residual))), Sums.OUTPUT_SHIFT
        elif original is not None:
            shift = rows(original.inputs[name]) - X
        if name in seen.norms:  # it multiplies the errors of a token
            root, shift = before_norms(*seen.norms[name], root, shift)
            self._sums.add_weights(name, root)
        elif name in self._raw:  # what follows divides the errors of a token by its size
            size = X.square().mean(-1, keepdim=True)
            root = size.rsqrt().masked_fill(size == 0, 0)
            self._sums.add_weights(name, root)
            shift = None if shift is None else shift * root
        self._sums.add_input(name, X if root is None else X * root, kind, shift)

    def _add_values(self, seen: Observation, original: Observation | None) -> None:
        mean = self.layout.key_value_heads / self.layout.heads  # over the query heads of a value head
        outputs = None if original is None else self._attention_shifts(seen, original)
        attention = cast(Attention, seen.attention)  # observed, because H_V was asked for
        X = seen.inputs[self.layout.groups[0].name]
        gates = None
        if attention.gate is not None:  # what multiplies the outputs, [n_kv, B, query heads, L, d_h]
            gates = attention.gate.float().unflatten(1, (self.layout.key_value_heads, -1)).transpose(0, 1)
        (_, length, d), count = X.shape, len(self.heads)
        every = stride(self.value_tokens, self.text, length, d)
        attended = AttendedInputs(attention, X, self.layout, every)
        for i, head in enumerate(self.heads):
            shift = None if outputs is None else outputs[head]
            root = shifts = None
            if gates is not None:
                gate = gates[head]
                root = gate.square().mean(-1, keepdim=True).sqrt()
                self._sums.of(GATE, X, count, gate.shape[-1])[i].add_(gate.square().sum((0, 1, 2)))
                if shift is not None:
                    shift = shift * gate / root.clamp(min=torch.finfo(torch.float32).tiny)
            if shift is not None:
                shifts = self._sums.of(ATTENDED_SHIFT, X, count, shift.shape[-1], d)[i]
            total = self._sums.of(ATTENDED, X, count, d, d)[i]
            attended.add(head, total, mean, root=root, shift=shift, shifts=shifts)

    def _attention_shifts(self, seen: Observation, original: Observation) -> Tensor:
        """Return ``Y_fp - Y`` of the attention's outputs, ``[n_kv, B, query heads that share it, L, d_h]``.

        The bias of V is in both, as the probabilities add up to 1.
        """
        layout = self.layout
        name = cast(InputGroup, layout.attended_group).name
        shift = original.inputs[name].float() - seen.inputs[name].float()
        B, L = seen.inputs[layout.groups[0].name].shape[:2]
        shift = shift.reshape(B, L, layout.key_value_heads, -1, layout.head_dim)  # [B, L, n_kv, shared, d_h]
        return shift.permute(2, 0, 3, 1, 4)

    def _add_scores(self, attention: Attention) -> None:
        shared = self.layout.heads // self.layout.key_value_heads
        Q, K = (operand(x.float()) for x in (attention.query, attention.key))
        keys = (K.transpose(-1, -2) @ K).sum(0)  # [n_kv, d_h, d_h]
        queries = (Q.transpose(-1, -2) @ Q).sum(0)  # [n_h, d_h, d_h]
        parts = {KEYS: keys.repeat_interleave(shared, 0), QUERIES: queries.unflatten(0, (-1, shared)).mean(1)}
        inverse = {QUERY_GAIN: attention.query_inverse_square, KEY_GAIN: attention.key_inverse_square}
        for name, of_heads in inverse.items():
            if of_heads is not None:  # finish() multiplies all sums by 2 / N, a mean has 1 / N
                parts[name] = of_heads.float().sum((0, 2)) / 2
        for name, part in parts.items():
            self._sums.of(name, part, *part.shape).add_(part)
        self._rotation = attention.rotation

    def _before_rotation(
        self, sums: Sums, name: str, gain: str, norm: int, norm_weights: tuple[Tensor, Tensor | None] | None
    ) -> Tensor | None:
        """Return G_Q or G_K as it acts on the outputs of the projection itself."""
        G, turned = sums.get(name), self._rotation
        if G is None:
            return None
        weight = None if norm_weights is None else norm_weights[norm]
        norm_last = turned is not None and turned.before_norm
        if weight is not None and norm_last:
            G = through_norm(G, weight.float(), sums[gain])
        if turned is not None:
            factor = turned.query_factor if name == KEYS else None  # G_Q = E[K^T K] acts on queries
            G = rotate_back(G, turned.cos, turned.sin, factor, neighbours=turned.neighbours)
        if weight is not None and not norm_last:
            G = through_norm(G, weight.float(), sums[gain])
        return G
