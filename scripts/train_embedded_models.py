"""Train the small models that come with the package, on the documentation of Python's library.

python scripts/train_embedded_models.py opt --minutes 40

The text is what the running interpreter carries: the docstrings of the standard library and the
language reference that ``help()`` shows (PSF licence). One module in twelve is held out.
"""

import ast
import math
import random
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal

import torch
from jsonargparse import auto_cli
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

Family = Literal["opt", "bloom", "llama"]
FOLDER = Path(__file__).parent.parent / "aespa_pl" / "embedded"
VOCABULARY, WIDTH, HEADS, BLOCKS, LENGTH = 1024, 128, 4, 3, 256
SKIPPED = ("test", "idlelib", "lib2to3", "encodings", "site-packages", "turtledemo", "pydoc_data")
HELD_OUT_EVERY = 12
CALIBRATION_BYTES, HELD_OUT_BYTES = 400_000, 120_000
BATCH, WARM_UP = 16, 100
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def main(family: Family, minutes: float = 40, learning_rate: float = 3e-3, seed: int = 0) -> None:
    """Train one family and write its folder; the texts are written again as well.

    Args:
        family: Which model.
        minutes: Time to train; the learning rate falls to 0 over it.
        learning_rate: Of AdamW, at its highest.
        seed: Of weights and batches.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    training, held_out = corpus()
    write_texts(training, held_out)
    tokenizer = train_tokenizer(training)
    tokens = encode(tokenizer, training)
    evaluation = encode(tokenizer, held_out)[: 120 * LENGTH].view(-1, LENGTH)
    print(f"{family}: {tokens.numel()} training tokens, {evaluation.numel()} held out", flush=True)
    model = new_model(family)
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, (0.9, 0.95), weight_decay=0.0)
    start, report, step, share = time.monotonic(), 0.0, 0, 0.0
    while share < 1:
        share = (time.monotonic() - start) / (60 * minutes)
        factor = min((step + 1) / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * min(share, 1)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * factor
        offsets = torch.randint(tokens.numel() - LENGTH, (BATCH,))
        ids = torch.stack([tokens[i : i + LENGTH] for i in offsets])
        loss = next_token_loss(model, ids)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if share > report or share >= 1:
            report += 0.1
            save(model, tokenizer, FOLDER / family)
            before, after = perplexity(model, evaluation), nearest_perplexity(family, evaluation)
            print(
                f"step {step} loss {loss.item():.3f} perplexity {before:.3f}, INT2 nearest "
                f"{after:.3f} (+{100 * (after / before - 1):.0f} %)",
                flush=True,
            )


def corpus() -> tuple[list[str], list[str]]:
    """Return the documents to train on and those held out, disjoint by module."""
    documents = [*module_documents(), *(text for _, text in sorted(topics.items()))]
    documents = [text for text in documents if len(text) > 400]
    random.Random(0).shuffle(documents)
    held_out = documents[::HELD_OUT_EVERY]
    training = [text for i, text in enumerate(documents) if i % HELD_OUT_EVERY]
    return training, held_out


def module_documents() -> Iterator[str]:
    """Yield the docstrings of each module of the standard library, joined."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if any(part in SKIPPED for part in path.relative_to(library).parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
        yield "\n\n".join(text for text in found if text)


def write_texts(training: list[str], held_out: list[str]) -> None:
    """Write the calibration and the held-out text."""
    for name, documents, size in (
        ("calibration.txt", training, CALIBRATION_BYTES),
        ("heldout.txt", held_out, HELD_OUT_BYTES),
    ):
        text = "\n\n".join(documents).encode()[:size].decode(errors="ignore")
        (FOLDER / name).write_text(text, encoding="utf-8")


def train_tokenizer(documents: list[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[*SPECIAL.values()], initial_alphabet=alphabet,
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)


def encode(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> Tensor:
    """Return the token ids of all documents, one after the other."""
    return torch.tensor(tokenizer("\n\n".join(documents), verbose=False)["input_ids"])


def new_model(family: Family) -> PreTrainedModel:
    """Return a model with random weights."""
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 3, "vocab_size": VOCABULARY}
    if family == "opt":
        return OPTForCausalLM(
            OPTConfig(
                hidden_size=WIDTH, word_embed_proj_dim=WIDTH, ffn_dim=4 * WIDTH, num_attention_heads=HEADS,
                num_hidden_layers=BLOCKS, max_position_embeddings=LENGTH, dropout=0.0,
                attention_dropout=0.0, **special,
            )
        )  # fmt: skip
    if family == "bloom":
        return BloomForCausalLM(
            BloomConfig(
                hidden_size=WIDTH, n_head=HEADS, n_layer=BLOCKS, hidden_dropout=0.0,
                attention_dropout=0.0, seq_length=LENGTH, **special,
            )
        )  # fmt: skip
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=WIDTH, intermediate_size=352, num_attention_heads=HEADS, num_key_value_heads=2,
            num_hidden_layers=BLOCKS, max_position_embeddings=LENGTH, tie_word_embeddings=True, **special,
        )
    )  # fmt: skip


def next_token_loss(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the mean negative log likelihood of positions 2 .. L."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


@torch.inference_mode()
def perplexity(model: PreTrainedModel, segments: Tensor) -> float:
    """Return the perplexity on segments ``[n, L]``."""
    losses = [next_token_loss(model, ids).item() for ids in segments.split(10)]
    return math.exp(sum(losses) / len(losses))


def nearest_perplexity(family: Family, segments: Tensor) -> float:
    """Return the perplexity of the stored model with its blocks rounded to INT2."""
    kind = {"opt": OPTForCausalLM, "bloom": BloomForCausalLM, "llama": LlamaForCausalLM}[family]
    model = kind.from_pretrained(FOLDER / family, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                W = module.weight
                low, high = (W.amin(1, keepdim=True).clamp(max=0), W.amax(1, keepdim=True).clamp(min=0))
                scale = (high - low) / 3
                zero = (-low / scale).round()
                W.copy_(scale * ((W / scale).round().add(zero).clamp(0, 3) - zero))
    return perplexity(model, segments)


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a Hugging Face folder in float16."""
    dtype = model.dtype
    model.half().save_pretrained(folder)
    model.to(dtype)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(auto_cli(main))
