"""Measure a model whose first blocks alone are quantized, by a run that may have been stopped behind them.

python benchmarks/first_blocks.py MODEL RUN 6 '[EVAL.safetensors]'

It is what ``benchmarks/peer_auto_round.py --blocks 6`` measures of auto-round, for models that take it hours.
"""

import json
import re
from pathlib import Path

import torch
from jsonargparse import auto_cli
from peer_auto_round import perplexity
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

INDEX = re.compile(r"\.(\d+)\.")
"""Finds the number of the block in a tensor's name."""


def main(model: str, run: Path, blocks: int, evaluation: list[str], *, threads: int = 1) -> None:
    """Print the perplexities.

    Args:
        model: Folder of the original model.
        run: Folder of the run, whose ``model`` has the blocks.
        blocks: Number of blocks that are taken from the run.
        evaluation: Files with ``ids``, the tokens of held-out texts ``[segments, length]``.
        threads: Threads of torch.
    """
    torch.set_num_threads(threads)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    taken = {}
    for file in sorted((run / "model").glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            index = INDEX.search(name)
            if index is not None and int(index[1]) < blocks:
                taken[name] = tensor
    found = {int(match[1]) for name in taken if (match := INDEX.search(name))}
    if found != set(range(blocks)):
        raise SystemExit(f"{run / 'model'} has only the blocks {sorted(found)}")
    network.load_state_dict(taken, strict=False)
    row = {
        Path(file).stem: round(perplexity(network, load_file(file)["ids"].long()), 3)
        for file in evaluation
    }
    print(json.dumps({"run": run.name, "blocks": blocks, "perplexity": row}))


if __name__ == "__main__":
    auto_cli(main)
