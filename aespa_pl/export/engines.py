"""The engines that can be asked whether an exported model is the run's model."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from transformers import AutoModelForCausalLM
from transformers.utils import logging as library_logging

from aespa_pl.errors import UserError
from aespa_pl.export.format import Format
from aespa_pl.export.quantized import QuantizedModel
from aespa_pl.models.streamed import StreamedModel

LARGEST_DIVERGENCE = 0.02
"""Largest KL divergence, in nats, of engines that round activations;
RTN models at 3 and 4 bits had 0.003 in llama.cpp, and a
wrong order of rows 1.1."""
PERPLEXITY_SHARE = 0.02
"""Largest relative difference of perplexities."""


class Engine(ABC):
    """An engine; stateless."""

    name: ClassVar[str]
    package: ClassVar[str]
    formats: ClassVar[tuple[str, ...]]
    exact: ClassVar[bool]
    """Whether it computes as the reference does, so that its logits are the same bit for bit."""
    first: ClassVar[int] = 0
    """The first position whose distribution it is asked for."""

    @abstractmethod
    def logits(self, folder: Path, tokens: Tensor, vocabulary: int) -> Tensor:
        """Return logits, or log-probabilities, ``[L - first, V]`` after each token.

        Args:
            folder: Of the exported model.
            tokens: ``[L]``.
            vocabulary: V.
        """

    @property
    def installed(self) -> bool:
        """Whether it can be asked."""
        return find_spec(self.package) is not None


class Transformers(Engine):
    """transformers, which dequantizes packed weights when it loads them."""

    name, package, exact = "transformers", "transformers", True
    formats = ("hf", "compressed-tensors")

    def logits(self, folder: Path, tokens: Tensor, vocabulary: int) -> Tensor:
        """Run all tokens at once in float32."""
        library_logging.disable_progress_bar()
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.inference_mode():
            result: Tensor = model.eval()(tokens[None], use_cache=False).logits[0]
        return result


class LlamaCpp(Engine):
    """llama.cpp, as the package xllamacpp brings it along."""

    name, package, exact = "llama.cpp", "xllamacpp", False
    formats = ("gguf",)
    first = 32  # one call a position, of a second and more for large vocabularies

    def logits(self, folder: Path, tokens: Tensor, vocabulary: int) -> Tensor:
        """Ask for the probabilities of all tokens, position by position."""
        xllamacpp: Any = import_module(self.package)
        settings = xllamacpp.CommonParams()
        settings.model.path = str(folder / "model.gguf")
        settings.n_ctx, settings.n_parallel, settings.n_gpu_layers = 256, 1, 0
        settings.warmup, settings.verbosity = False, 0
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
        server, ids = xllamacpp.Server(settings), tokens.tolist()
        # the server says nothing of a token that is half a character; which one it draws is no matter,
        # because the probabilities are those before the bias
        reader = import_module("gguf").GGUFReader(settings.model.path)
        letter = reader.get_field("tokenizer.ggml.tokens").contents().index("a")
        result = torch.full((len(ids) - self.first, vocabulary), -torch.inf)
        for row, end in enumerate(range(self.first + 1, len(ids) + 1)):
            answer = server.handle_completions(
                {
                    "prompt": ids[:end],
                    "max_tokens": 1,
                    "temperature": 0,
                    "n_probs": vocabulary,
                    "logit_bias": [[letter, 1000.0]],
                    "cache_prompt": True,
                }
            )
            for entry in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
                result[row, entry["id"]] = entry["logprob"]
        return result


class Vllm(Engine):
    """vLLM; its CPU build holds 4-bit containers only."""

    name, package, exact = "vllm", "vllm", False
    formats = ("hf", "compressed-tensors", "awq")

    def logits(self, folder: Path, tokens: Tensor, vocabulary: int) -> Tensor:
        """Ask for the log-probabilities of every token at every position."""
        vllm: Any = import_module(self.package)
        engine = vllm.LLM(
            model=str(folder),
            dtype="float16",
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=1,
            max_logprobs=-1,
            logprobs_mode="raw_logprobs",
        )
        request = vllm.SamplingParams(
            max_tokens=1, temperature=0, prompt_logprobs=-1, logprobs=-1, detokenize=False
        )
        (answer,) = engine.generate(
            [{"prompt_token_ids": tokens.tolist()}], request, use_tqdm=False
        )
        result = torch.full((len(tokens), vocabulary), -torch.inf)
        for row, values in enumerate([*answer.prompt_logprobs[1:], answer.outputs[0].logprobs[0]]):
            for token, value in values.items():
                result[row, token] = value.logprob
        return result


class GptqModel(Engine):
    """GPTQModel through transformers."""

    name, package, exact = "gptqmodel", "gptqmodel", False
    formats = ("gptq",)

    def logits(self, folder: Path, tokens: Tensor, vocabulary: int) -> Tensor:
        """Run all tokens at once in float16, which its kernels want."""
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float16, device_map="cpu"
        )
        with torch.inference_mode():
            result: Tensor = model.eval()(tokens[None], use_cache=False).logits[0].float()
        return result


ENGINES: tuple[Engine, ...] = (Transformers(), LlamaCpp(), Vllm(), GptqModel())


@dataclass(frozen=True)
class Agreement:
    """How near an engine's distributions are to the run's."""

    engine: str
    version: str
    difference: float
    """Largest of the logits'; of an engine that is not exact, of the log-probabilities'."""
    divergence: float
    """Mean KL divergence, nats."""
    perplexity: float
    reference: float
    """The run's perplexity at the same positions."""

    @property
    def text(self) -> str:
        """What a person wants to know."""
        if self.difference == 0:
            return f"{self.version}, logits equal"
        return (
            f"{self.version}, KL {self.divergence:.1e}, perplexity {self.perplexity:.2f} "
            f"of {self.reference:.2f}"
        )


def reference_logits(model: QuantizedModel, chosen: Format, tokens: Tensor) -> Tensor:
    """Return the logits ``[L, V]`` of the weights that a format holds, one block in memory at a time."""
    source = StreamedModel.open(model.pretrained, model.family, torch.device("cpu"), torch.float32)
    hidden = source.embed(tokens[None], 1)
    for index in range(model.block_count):
        matrices = model.block(index).matrices
        prefix = model.family.block_prefix(index)
        with source.block(index) as block, torch.no_grad():
            for name, matrix in matrices.items():
                weight = chosen.expected(model, name, matrix.dequantized())
                block.get_parameter(name.removeprefix(prefix)).copy_(weight)
            source.advance(block, hidden)
    with source.stem(), torch.inference_mode():
        return model.family.head(source.model, hidden[0])[0]


def compare(engine: Engine, reference: Tensor, found: Tensor, tokens: Tensor) -> Agreement:
    """Compare distributions.

    Args:
        engine: Whose they are.
        reference: The run's logits ``[L, V]``.
        found: The engine's logits or log-probabilities ``[L - first, V]``.
        tokens: ``[L]``.

    Raises:
        UserError: They differ by more than the engine's own rounding explains.
    """
    reference, following = reference[engine.first :], tokens[engine.first + 1 :]
    expected, got = log_softmax(reference.double(), -1), log_softmax(found.double(), -1)
    divergences = kl_div(got, expected, reduction="none", log_target=True).sum(-1)
    divergence = float(divergences.mean())
    losses = [cross_entropy(p[:-1], following, reduction="none") for p in (expected, got)]
    change = losses[1] - losses[0]
    far = _surely_above(divergences, LARGEST_DIVERGENCE) or _surely_above(
        change * change.mean().sign(), math.log1p(PERPLEXITY_SHARE)
    )
    if engine.exact:
        difference = float((reference - found).abs().max())
        wrong = difference > 0
    else:
        difference = float((expected - got).abs().max())
        wrong = not math.isfinite(divergence) or far
    reference_perplexity, perplexity = (math.exp(float(loss.mean())) for loss in losses)
    if wrong:
        raise UserError(
            f"{engine.name} runs the exported model in another way than the run: next-token "
            f"distributions have KL divergence {divergence:.3g} (logits differ by {difference:.3g}, "
            f"perplexity {perplexity:.4g} instead of {reference_perplexity:.4g}); nothing was kept. "
            "Use another --format, or --verify bytes if this engine is not the one you deploy with"
        )
    return Agreement(
        engine.name,
        f"{engine.package} {version(engine.package)}",
        difference,
        divergence,
        perplexity,
        reference_perplexity,
    )


def _surely_above(values: Tensor, bound: float) -> bool:
    """Return whether a mean is above a bound by more than chance: two standard errors.

    The positions are few, and one where the run is nearly undecided can hold most of the divergence.
    """
    return float(values.mean() - 2 * values.std() / math.sqrt(len(values))) > bound
