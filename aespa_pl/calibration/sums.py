"""Hold the sums over tokens that the statistics of a block are made of, by name."""

import torch
from torch import Tensor

from aespa_pl.calibration.observe import Observation

INPUT, SHIFT, OUTPUT_SHIFT, MAGNITUDE = "input ", "shift ", "output shift ", "magnitude "
"""Prefixes of the sums of an input."""


class Sums(dict[str, Tensor]):
    """Holds sums by name, in float32."""

    def of(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """Return the sum of a name; the first time it is zero."""
        if name not in self:
            # blocks run in inference mode, but sums are changed outside of it
            with torch.inference_mode(mode=False):
                self[name] = torch.zeros(shape, dtype=torch.float32, device=like.device)
        return self[name]

    def named(self, prefix: str) -> dict[str, Tensor]:
        """Return the sums of the inputs that have a prefix, by input."""
        return {k.removeprefix(prefix): v for k, v in self.items() if k.startswith(prefix)}


def rows(X: Tensor) -> Tensor:
    """Return ``[B, L, d]`` of any type as ``[B * L, d]`` in float32."""
    return X.flatten(0, -2).float()


def stream(seen: Observation, name: str, shape: torch.Size) -> Tensor:
    """Return the residual stream ``[B, L, d]`` with the output that is added to it, in float32."""
    # some families flatten the others
    return (seen.residuals[name].float() + seen.outputs[name].float()).view(shape)
