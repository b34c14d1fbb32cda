"""Weigh the errors of tokens: massive activations, and the first token of a segment, count more.

The norms that follow divide a token by its own size, so the error of each token counts relative to it. Two
kinds of tokens count more. In many models one token of a segment, most often the first, has activations
some hundred times as large as the others', and heads that have nothing to say attend to it. What is lost of
it, or of the first token from which a later block makes it, is lost for all of them.

Source: not in the paper. "Massive Activations in Large Language Models" (arXiv 2402.17762) and "Efficient
Streaming Language Models with Attention Sinks" (arXiv 2309.17453) describe such tokens.
"""

import torch
from jaxtyping import Float
from torch import Tensor

MASSIVE = 10.0
"""Ratio of a token's mean square to the median of its segment, above which its activations count as massive.
Of the first token of a segment in SmolLM2-135M it is about 30,000 behind block 11."""
FIRST = 0.04
"""Weight of a segment's first token, as a fraction of the number of tokens."""


def error_divisors(
    target: Float[Tensor, "*batch L d"], output: Float[Tensor, "*batch L d"]
) -> Float[Tensor, "*batch L"]:
    """Return what the mean squared error of each token is divided by; above 0.

    It is the mean square p of the token's target. Three things change it:

    * Where p is above ``MASSIVE`` times the median m of the segment, it is ``sqrt(p MASSIVE m)``.
    * Elsewhere it is the mean square of the output, where that is larger. The quantized model may make a
      massive activation of a token that has none; relative to its target, its error would exceed all others.
    * For the first token it is at most ``max(p, mean square of the output) / max(1, FIRST L)``, so that it
      counts like ``FIRST L`` tokens.

    The hidden states are the original model's and the quantized one's; no gradient goes through the result.
    """
    return _divisors_and_bound(target, output)[0]


def token_weights(
    target: Float[Tensor, "*batch L d"], output: Float[Tensor, "*batch L d"]
) -> Float[Tensor, "*batch L"]:
    """Return the weight ``min(1, MASSIVE m / D)`` of each token's squared error; D, m are as above."""
    divisors, bound = _divisors_and_bound(target, output)
    return (bound / divisors).clamp(max=1)


def _divisors_and_bound(target: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    """Return the divisors, and the mean square above which a token of its segment is massive."""
    p = target.square().mean(-1)
    bound = MASSIVE * p.median(dim=-1, keepdim=True).values
    bound = torch.where(bound > 0, bound, torch.inf)  # no token is massive beside targets that are all 0
    larger = p.maximum(output.detach().square().mean(-1))
    divisors = torch.where(p > bound, (p * bound).sqrt(), larger)
    first = larger[..., :1] / max(1.0, FIRST * p.shape[-1])
    divisors[..., :1] = divisors[..., :1].minimum(first)
    return divisors.clamp(min=torch.finfo(p.dtype).tiny), bound
