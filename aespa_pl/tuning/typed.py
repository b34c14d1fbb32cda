"""Learn the numbers of a block type: integers, scales and minimums of groups, and the factors of blocks.

A weight is ``d a (q - zero_point) - d_min c`` (``algorithm/grid_types.py``). d and d_min have logarithms as
parameters, because their signs stay; a and c are learned as fractions of their largest values. All are
rounded to what the type stores in every forward pass, with straight-through gradients. Latent values are in
mean distances of two integers, so that learning rates do not depend on a type's levels.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from aespa_pl.algorithm.grid_types import TypedWeight, nearest, round_to_half
from aespa_pl.tuning.parametrization import MARGIN, WeightParametrization, straight_through


class TypedStraightThrough(WeightParametrization):
    """Learns all numbers of a block type."""

    def __init__(self, start: TypedWeight, target: Tensor) -> None:
        """Start at a stored weight, which stands for ``target [rows, d_in]``."""
        super().__init__()
        self.kind, self.bits, self.levels = start.kind, start.bits, start.kind.levels
        scale, minimum = (x.repeat_interleave(self.kind.group, 1) for x in start.grid())
        q = start.integers / self.kind.distance
        offset = (target.float() + minimum) / scale / self.kind.distance - q
        latent = q + offset.clamp_(-MARGIN, MARGIN)
        self._start = torch.where(self.nearest(latent) == q, latent, q)  # levels may be closer to each other
        self.groups, none = scale.shape[1] // self.kind.group, start.d.new_zeros(())
        for name, factor in (("d", start.d), ("d_min", start.d_min)):
            value = (none if factor is None else factor).float()
            self.register_buffer(name, torch.where(value < 0, -1.0, 1.0), persistent=False)
            if factor is not None:
                self.register_parameter(f"log_{name}", nn.Parameter(value.abs().log()))
        for name, integers, limits in (
            ("a", start.sub_scale, self.kind.scales), ("c", start.sub_min, self.kind.minimums)
        ):  # fmt: skip
            if integers is not None:
                self.register_parameter(name, nn.Parameter(integers.float() / limits[1]))

    def forward(self, latent: Tensor) -> Tensor:
        """Return the weight of the nearest numbers that are stored."""
        scale = self._product("d", "a", self.kind.scales) * self.kind.distance
        zero_point = torch.full_like(scale, self.kind.offset / self.kind.distance)
        weight = self.dequantized(latent, scale, zero_point)
        if self.kind.minimums == (0, 0):
            return weight
        minimum = self._product("d_min", "c", self.kind.minimums)[..., None]
        shifted: Tensor = weight.unflatten(1, (self.groups, -1)) - minimum
        return shifted.flatten(1)

    def nearest(self, latent: Tensor) -> Tensor:
        """Return the latent values of the nearest integers."""
        if self.levels is None:
            return super().nearest(latent)
        return nearest(latent * self.kind.distance, self.levels) / self.kind.distance

    @torch.no_grad()
    def quantized(self, latent: Tensor) -> TypedWeight:
        """Return the numbers that are stored."""
        kind, minimums = self.kind, self.kind.minimums
        integers = (self.nearest(latent) * kind.distance).to(torch.uint8)
        a, c = self._integers("a", kind.scales), self._integers("c", minimums)
        return TypedWeight(
            integers,
            self._factor("d").to(torch.float16),
            self._factor("d_min").to(torch.float16) if minimums[1] else None,
            None if a is None else a.to(kind.scale_type),
            None if c is None else c.to(torch.uint8),
            kind=kind,
        )

    def _product(self, factor: str, integers: str, limits: tuple[int, int]) -> Tensor:
        """Return the scales, or minimums, ``[rows, groups]``."""
        whole = self._integers(integers, limits)
        value = self.kind.each_group(self._factor(factor), self.groups)
        return value if whole is None else value * whole

    def _factor(self, name: str) -> Tensor:
        value = getattr(self, f"log_{name}").exp() * getattr(self, name)
        return straight_through(round_to_half(value), value)

    def _integers(self, name: str, limits: tuple[int, int]) -> Tensor | None:
        learned = cast(Any, self._parameters.get(name))
        if learned is None:
            return None
        value = learned * limits[1]
        whole = value.round().clamp(*limits)
        if name == "a":  # a scale of 0 could never change again
            whole = torch.where(whole == 0, 1.0, whole)
        return straight_through(whole, value)
