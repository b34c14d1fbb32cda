"""Tune the blocks of a finished run, then the model end to end: the measurements of ``docs/tuning.md``.

python benchmarks/tuning.py RUN MODEL EVAL.safetensors CALIBRATION.safetensors

RUN is the folder of a run on MODEL, whose blocks are tuned in their order, each on the hidden states that
the tuned ones before it make. Each safetensors file holds ``ids``: ``[segments, L]`` for calibration,
``[1, tokens]`` for evaluation. Seconds are those of the processor.
"""

import copy
import json
import logging
import math
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jsonargparse import auto_cli
from lightning.pytorch import Trainer
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from aespa_pl.models import family_of
from aespa_pl.models.family import BlockLayout, Family
from aespa_pl.models.headers import DTYPES
from aespa_pl.models.hub import resolve
from aespa_pl.models.pretrained import Checkpoint
from aespa_pl.models.weights import fold, projection_weight
from aespa_pl.tuning import (
    LearningRates,
    QuantizedWeight,
    SegmentPairs,
    TunableBlock,
    TunableModel,
    reconstruct,
    tune_model,
)

BATCH = 8
"""Segments that run through a block at once where nothing is trained."""


@dataclass(frozen=True)
class Recipe:
    """What the tuning is done with."""

    epochs: int = 2
    """Epochs of each block; 0: blocks are not tuned."""
    batch_size: int = 1
    """Segments in a mini-batch of a block."""
    latent_rate: float = 1e-2
    """Largest learning rate of the latent values."""
    scale_rate: float = 3e-3
    """Largest learning rate of scales, norms and biases."""
    model_epochs: int = 1
    """Epochs of the end-to-end tuning; 0: none."""
    model_batch_size: int = 2
    """Segments in a mini-batch of the model."""
    model_rate: float = 3e-3
    """Largest learning rate of the end-to-end tuning."""
    held_back: float = 0.0625
    """Share of the segments that only chooses the best epoch."""
    seed: int = 0
    """Seed of the order."""


DEFAULTS = Recipe()


@dataclass
class Models:
    """The original, and the quantized model whose blocks are tuned in place."""

    original: Any
    quantized: Any
    family: Family
    dtypes: Mapping[str, torch.dtype]

    @property
    def layout(self) -> BlockLayout:
        """The layout of every block."""
        return self.family.layout(self.original.config)

    def blocks(self, model: Any) -> list[nn.Module]:
        """Return the blocks of one of the models."""
        return list(model.get_submodule(self.family.blocks_path))

    def run_block(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """Run a batch through a block."""
        return self.family.run_block(block, hidden, self.family.arguments(self.original, hidden))

    @torch.no_grad()
    def advance(self, block: nn.Module, batches: list[Tensor]) -> list[Tensor]:
        """Run all batches through a block."""
        return [self.run_block(block, hidden) for hidden in batches]


def main(
    run: Path,
    model: str,
    evaluation: Path,
    calibration: Path,
    *,
    bits: int = 2,
    recipe: Recipe = DEFAULTS,
    threads: int = 1,
    label: str = "",
    output: Path | None = None,
) -> None:
    """Tune and print perplexities and processor seconds.

    Args:
        run: Folder of a finished run.
        model: The original, as model.pretrained.
        evaluation: Token ids of the held-out text.
        calibration: Token ids of the calibration segments.
        bits: Bits that the run has.
        recipe: What the tuning is done with.
        threads: Threads of torch.
        label: Name of the row.
        output: A JSON line is appended to this file.
    """
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(threads)
    tokens = load_file(calibration)["ids"].long()
    held_out = load_file(evaluation)["ids"].long().view(-1, tokens.shape[1])
    models = _open(run / "model", resolve(model, None))
    row: dict[str, Any] = {"label": label, "start": _perplexity(models.quantized, held_out)}
    begin = time.process_time()
    weights, original, row["reconstructions"] = _tune_blocks(run, models, tokens, bits, recipe)
    row["blocks_seconds"] = round(time.process_time() - begin, 1)
    row["blocks"] = _perplexity(models.quantized, held_out)
    if recipe.model_epochs:
        begin = time.process_time()
        row["divergence"] = _tune_model(models, weights, tokens, original, recipe)
        row["model_seconds"] = round(time.process_time() - begin, 1)
        row["model"] = _perplexity(models.quantized, held_out)
    print(json.dumps(row))
    if output:
        with output.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, "recipe": vars(recipe)}) + "\n")


def _open(quantized: Path, original: Path) -> Models:
    opened = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (original, quantized)
    ]
    stored = Checkpoint.open(original).tensors
    dtypes = {name: DTYPES[tensor.dtype] for name, tensor in stored.items()}
    return Models(opened[0], opened[1], family_of(opened[0].config), dtypes)


def _perplexity(model: Any, tokens: Tensor) -> float:
    total = 0.0
    with torch.no_grad():
        for ids in tokens.split(BATCH):
            logits = model(ids).logits[:, :-1].flatten(0, 1)
            total += float(cross_entropy(logits.double(), ids[:, 1:].flatten(), reduction="sum"))
    return round(math.exp(total / (tokens.numel() - len(tokens))), 4)


def _tune_blocks(
    run: Path, models: Models, tokens: Tensor, bits: int, recipe: Recipe
) -> tuple[list[dict[str, QuantizedWeight]], list[Tensor], list[dict[str, Any]]]:
    """Return the weights of all blocks, the original's last hidden states, and what was found."""
    with torch.no_grad():
        hidden = [models.family.embed(models.original, ids)[0] for ids in tokens.split(BATCH)]
    original, all_weights, found = hidden, [], []
    pairs = zip(models.blocks(models.quantized), models.blocks(models.original), strict=True)
    for index, (block, source) in enumerate(pairs):
        stored = load_file(run / "blocks" / f"block_{index:03}.safetensors")
        original = models.advance(source, original)
        weights = {
            p.name: QuantizedWeight(
                stored[f"{p.name}.integers"],
                stored[f"{p.name}.scale"].float(),
                stored[f"{p.name}.zero_point"].float(),
                bits,
            )
            for p in models.layout.projections
        }
        if recipe.epochs:
            quantized = _quantized_block(
                models, block, source, index, weights=weights, stored=stored
            )
            result = reconstruct(
                quantized,
                SegmentPairs(
                    hidden,
                    original,
                    batch_size=recipe.batch_size,
                    held_back=recipe.held_back,
                    seed=recipe.seed,
                ),
                run_block=models.run_block,
                rates=LearningRates(recipe.latent_rate, recipe.scale_rate),
                trainer=_trainer(recipe.epochs),
                label=f"block {index}",
            )
            weights = result.weights
            kinds = ("start_error", "error", "epoch", "changed")
            found.append({kind: round(getattr(result, kind), 5) for kind in kinds})
        all_weights.append(weights)
        hidden = models.advance(block, hidden)
    return all_weights, original, found


def _quantized_block(
    models: Models,
    block: nn.Module,
    source: nn.Module,
    index: int,
    *,
    weights: Mapping[str, QuantizedWeight],
    stored: Mapping[str, Tensor],
) -> TunableBlock:
    folded = copy.deepcopy(source).requires_grad_(requires_grad=False)
    zeta = {
        g.name: stored[f"{g.name}.zeta"] for g in models.layout.groups if f"{g.name}.zeta" in stored
    }
    fold(folded, models.layout, zeta)
    targets = {
        p.name: projection_weight(folded, models.layout, p) for p in models.layout.projections
    }
    prefix = f"{models.family.blocks_path}.{index}."
    dtypes = {n.removeprefix(prefix): d for n, d in models.dtypes.items() if n.startswith(prefix)}
    return TunableBlock(block, models.layout, weights, targets, dtypes)


def _tune_model(
    models: Models,
    weights: list[dict[str, QuantizedWeight]],
    tokens: Tensor,
    original: list[Tensor],
    recipe: Recipe,
) -> list[float]:
    """Return the divergence at the start and at the best epoch."""
    quantized = TunableModel(
        models.quantized, models.blocks(models.quantized), models.layout, weights, models.dtypes
    )
    pairs = SegmentPairs(
        list(tokens.split(BATCH)),
        original,
        batch_size=recipe.model_batch_size,
        held_back=recipe.held_back,
        seed=recipe.seed,
    )
    result = tune_model(
        quantized,
        pairs,
        head=lambda hidden: models.family.head(models.original, hidden),
        rate=recipe.model_rate,
        trainer=_trainer(recipe.model_epochs),
    )
    return [result.start_error, result.error, result.epoch]


def _trainer(epochs: int) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=-1,
    )


if __name__ == "__main__":
    auto_cli(main)
