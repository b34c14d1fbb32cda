r"""Measure all rows of ``docs/results.md`` and print them as a Markdown table.

python benchmarks/results.py ROWS.jsonl --bits [2,3] --methods '["aespa + D", "Z-Fold + OPTQ"]'
python benchmarks/results.py ROWS.jsonl --bits [2,3] --methods '["aespa + D"]' \
    --models '{"tiny-opt": ["PATH", "EVAL", ["CALIB_0", "CALIB_1"]]}'
python benchmarks/results.py ROWS.jsonl          # only the table of what has been measured

The embedded models are the default; rows that the file has already are not measured again.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from jsonargparse import auto_cli

CORRECTION = 0.5


def options(
    method: str, *, polish: bool = False, correction: float = 0, keep_best: bool = True
) -> list[str]:
    """Return the options of a row; none is left to its default."""
    return [
        f"--quantization.method={method}",
        f"--quantization.polish.enabled={str(polish).lower()}",
        f"--quantization.input_correction={correction}",
        f"--quantization.rounding.keep_best={str(keep_best).lower()}",
    ]


METHODS = {
    "Z-Fold + OPTQ": options("aespa-fast"),
    "aespa (paper)": options("aespa", keep_best=False),
    "aespa, keep_best": options("aespa"),
    "aespa + D": options("aespa", polish=True),
    "aespa + D + C": options("aespa", polish=True, correction=CORRECTION),
    "aespa-hybrid + D + C": options("aespa-hybrid", polish=True, correction=CORRECTION),
    "aespa-fast + D + C": options("aespa-fast", polish=True, correction=CORRECTION),
    **{
        f"aespa-fast + D + C {share}": options("aespa-fast", polish=True, correction=share)
        for share in (0, 0.25, 0.75, 1)
    },
    **{
        f"aespa + D + C, {products}": [
            *options("aespa", polish=True, correction=CORRECTION), f"--quantization.products={products}",
        ]
        for products in ("float32", "tf32", "bfloat16")
    },
    "layer-wise": [
        *options("aespa"), "--quantization.objective.query_key=layer", "--quantization.objective.value=layer",
    ],
}  # fmt: skip
"""D: descent on the integers (polish); C: correction of earlier blocks' errors."""
EMBEDDED = {
    f"embedded:{family}": (
        f"embedded:{family}", "embedded", [f"embedded@{seed}" for seed in range(3)],
    )
    for family in ("opt", "bloom", "llama")
}  # fmt: skip
BENCHMARK = Path(__file__).parent / "accuracy.py"


def main(
    rows: Path,
    *,
    models: dict[str, tuple[str, str, list[str]]] | None = None,
    methods: list[str] | None = None,
    bits: list[int] | None = None,
    threads: int = 1,
) -> None:
    """Measure the missing rows and print the table.

    Args:
        rows: JSON lines, one a row of the table; new ones are appended.
        models: By name, the embedded ones by default: model, evaluation text or ids, calibration
            texts or ids (a seed each).
        methods: Some of METHODS; none by default.
        bits: Of the rows to measure; 2 by default.
        threads: Threads of torch.
    """
    chosen = EMBEDDED if models is None else models
    known = {row["label"] for row in _read(rows)}
    for width in bits or [2]:
        for name, (model, evaluation, calibration) in chosen.items():
            for method in methods or []:
                label = f"{name}|{width}|{method}"
                if label not in known:
                    command = [sys.executable, str(BENCHMARK), model, evaluation]
                    command += [json.dumps(calibration), *METHODS[method]]
                    command += ["--quantization.bits", str(width), "--label", label]
                    command += ["--threads", str(threads), "--output", str(rows)]
                    command += ["--nearest", "true"]
                    subprocess.run(command, check=True)
    _print_table(rows)


def _read(rows: Path) -> list[dict[str, Any]]:
    if not rows.is_file():
        return []
    return [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]


def _print_table(rows: Path) -> None:
    print(
        "| model | bits | original | nearest | method | mean | spread | seeds | seconds | rounding |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in sorted(_read(rows), key=lambda row: str(row["label"])):
        name, width, method = str(row["label"]).split("|")
        values = [float(value) for value in row["perplexity"]]
        spread = f"{statistics.stdev(values):.3f}" if len(values) > 1 else "."
        seconds, taken = row.get("seconds"), ". | ."  # none of a machine that did other things
        if seconds:
            rounding = seconds["rounding"] + seconds.get("polish", 0)
            taken = f"{seconds['total']:.0f} | {rounding:.1f}"
        each = " / ".join(f"{value:.3f}" for value in values)
        print(
            f"| {name} | {width} | {row['original']:.3f} | {row['nearest']:.3f} | {method} | "
            f"{statistics.mean(values):.3f} | {spread} | {each} | {taken} |"
        )


if __name__ == "__main__":
    auto_cli(main)
