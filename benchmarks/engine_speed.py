"""Measure what llama.cpp does with GGUF files: tokens a second, memory, and a paragraph at temperature 0.

python benchmarks/engine_speed.py '{ours: OURS.gguf, theirs: THEIRS.gguf}' --repeats 5

The files take turns, each time in a process of its own, on one thread of the CPU. Speeds are llama.cpp's own
figures, of a prompt of about 500 tokens and of what it generates after ``--start``; a cell has their median.
"""

import json
import resource
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from jsonargparse import auto_cli

from aespa_pl.data.texts import EMBEDDED

GENERATED = 100
PROMPT_LETTERS = 2000


def main(files: dict[str, Path], *, start: str = "The city of Paris is", repeats: int = 3) -> None:
    """Print a table, and what each file says.

    Args:
        files: GGUF files by their names in the table.
        start: Beginning of the paragraph.
        repeats: Processes for each file.
    """
    from aespa_pl.evaluation.table import TextTable  # noqa: PLC0415 - its torch is no memory of llama.cpp

    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in files}
    for _ in range(repeats):
        for name, file in files.items():
            words = [sys.executable, __file__, "--child", str(file), start]
            done = subprocess.run(words, capture_output=True, text=True, check=True)
            answers[name].append(json.loads(done.stdout.splitlines()[-1]))
    rows = [
        [
            name,
            f"{files[name].stat().st_size / 1e6:.1f}",
            *(f"{median(a[key] for a in of):.1f}" for key in KEYS),
        ]
        for name, of in answers.items()
    ]
    print(TextTable(["file", "MB", *KEYS.values()], rows).markdown())
    for name, of in answers.items():
        print(f"\n{name}: {start}{of[0]['text']}")


KEYS = {"prompt": "prompt, tokens / s", "generated": "generated, tokens / s", "memory": "peak memory, MB"}


def child(file: str, start: str) -> None:
    """Run one file, and print its figures as JSON."""
    import xllamacpp  # noqa: PLC0415 (only here: it takes memory)

    settings = xllamacpp.CommonParams()
    settings.model.path = file
    settings.n_ctx, settings.n_parallel, settings.n_gpu_layers = 1024, 1, 0
    settings.verbosity = 0
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(settings)

    def asked(prompt: str, count: int) -> dict[str, Any]:
        request = {"prompt": prompt, "max_tokens": count, "temperature": 0, "cache_prompt": False}
        answer: dict[str, Any] = server.handle_completions(request)
        return answer

    text = (EMBEDDED / "heldout.txt").read_text(encoding="utf-8")[:PROMPT_LETTERS]
    long, paragraph = asked(text, 1), asked(start, GENERATED)
    figures = {
        "prompt": long["timings"]["prompt_per_second"],
        "generated": paragraph["timings"]["predicted_per_second"],
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
        "text": paragraph["choices"][0]["text"],
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        auto_cli(main)
