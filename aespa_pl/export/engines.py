"""Ask engines whether an exported model is the run's model."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from aespa_pl.errors import UserError


class Engine(ABC):
    """Stands for an engine; it has no state."""

    name: ClassVar[str]
    package: ClassVar[str]
    formats: ClassVar[tuple[str, ...]]
    exact: ClassVar[bool]
    """Whether it computes as the reference does, so that its logits are the same bit for bit."""
    first: ClassVar[int] = 0
    """First position whose distribution it is asked for."""

    @abstractmethod
    def logits(self, folder: Path, tokens: Tensor, vocabulary: int) -> Tensor:
        """Return logits, or log-probabilities, ``[L - first, V]`` after each of the tokens ``[L]``."""

    def rounded(self, x: Tensor) -> Tensor:
        """Return the input ``[..., d_in]`` of a matrix as the engine rounds it: most to float16."""
        return x.half().to(x.dtype)

    @property
    def installed(self) -> bool:
        """Tell whether it can be asked."""
        return find_spec(self.package) is not None


class Transformers(Engine):
    """Asks transformers, which dequantizes packed weights when it loads them."""

    name, package, exact = "transformers", "transformers", True
    formats: ClassVar[tuple[str, ...]] = ("hf", "compressed-tensors")
    options: ClassVar[Mapping[str, Any]] = {"dtype": torch.float32}

    def logits(self, folder: Path, tokens: Tensor, vocabulary: int) -> Tensor:
        """Run all tokens at once."""
        model: Any = AutoModelForCausalLM.from_pretrained(folder, **self.options)
        with torch.inference_mode():
            logits: Tensor = model.eval()(tokens[None], use_cache=False).logits[0].float()
        return logits


class GptqModel(Transformers):
    """Asks GPTQModel through transformers; its kernels want float16."""

    name, package, exact = "gptqmodel", "gptqmodel", False
    formats = ("gptq",)
    options: ClassVar[Mapping[str, Any]] = {"dtype": torch.float16, "device_map": "cpu"}


class LlamaCpp(Engine):
    """Asks llama.cpp, which the package xllamacpp brings along."""

    name, package, exact = "llama.cpp", "xllamacpp", False
    formats = ("gguf",)
    first = 32  # one call a position, of a second and more for large vocabularies

    def rounded(self, x: Tensor) -> Tensor:
        """Round to 8 bits: blocks of 256 as beside Q2_K and Q4_K, or 32 where the width allows no other."""
        width = next((size for size in (256, 32) if x.shape[-1] % size == 0), x.shape[-1])
        blocks = x.unflatten(-1, (-1, width))
        step = blocks.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny) / 127
        rounded: Tensor = (blocks / step).round() * step
        return rounded.flatten(-2)

    def logits(self, folder: Path, tokens: Tensor, vocabulary: int) -> Tensor:
        """Ask for the probabilities of all tokens, position by position.

        Raises UserError where llama.cpp can't load the file, which it can't elsewhere either.
        """
        xllamacpp: Any = import_module(self.package)
        settings = xllamacpp.CommonParams()
        settings.model.path = str(folder / "model.gguf")
        settings.n_ctx, settings.n_parallel, settings.n_gpu_layers = 256, 1, 0
        settings.warmup, settings.verbosity = False, 0
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
        try:
            server = xllamacpp.Server(settings)
        except RuntimeError as error:
            raise UserError(
                f"llama.cpp can't load the exported model ({error}); nothing was kept. Use another --format, "
                "or --verify bytes where you have another version of llama.cpp"
            ) from error
        ids = tokens.tolist()
        # the server says nothing of a token that is half a character; which one it draws is no matter,
        # because the probabilities are those before the bias
        options: dict[str, Any] = {
            "logit_bias": [["a", 1000.0]],
            "max_tokens": 1,
            "temperature": 0,
            "n_probs": vocabulary,
        }
        result = torch.full((len(ids) - self.first, vocabulary), -torch.inf)
        for row, end in enumerate(range(self.first + 1, len(ids) + 1)):
            answer = server.handle_completions({"prompt": ids[:end], "cache_prompt": True, **options})
            for entry in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
                result[row, entry["id"]] = entry["logprob"]
        return result


class Vllm(Engine):
    """Asks vLLM; its CPU build holds 4-bit containers only."""

    name, package, exact = "vllm", "vllm", False
    formats = ("hf", "compressed-tensors", "awq")

    def logits(self, folder: Path, tokens: Tensor, vocabulary: int) -> Tensor:
        """Ask for the log-probabilities of every token at every position."""
        vllm: Any = import_module(self.package)
        limits = {"max_model_len": 256, "max_num_seqs": 1, "max_logprobs": -1}
        options = {"dtype": "float16", "enforce_eager": True, "logprobs_mode": "raw_logprobs"}
        engine = vllm.LLM(model=str(folder), **options, **limits)
        request = vllm.SamplingParams(
            max_tokens=1, temperature=0, prompt_logprobs=-1, logprobs=-1, detokenize=False
        )
        (answer,) = engine.generate([{"prompt_token_ids": tokens.tolist()}], request, use_tqdm=False)
        result = torch.full((len(tokens), vocabulary), -torch.inf)
        for row, values in enumerate([*answer.prompt_logprobs[1:], answer.outputs[0].logprobs[0]]):
            for token, value in values.items():
                result[row, token] = value.logprob
        return result


ENGINES: tuple[Engine, ...] = (Transformers(), LlamaCpp(), Vllm(), GptqModel())
