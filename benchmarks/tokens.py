r"""Write the tokens that a run takes to files, for another tool that shall have the same ones.

python benchmarks/tokens.py MODEL FOLDER --calibration.source c4_calibration.jsonl \
    --calibration.segments 64 --calibration.segment_length 512 \
    --evaluation.segment_length 512 --evaluation.max_segments 40 \
    --evaluation.texts '[wikitext2_raw_validation.json, c4_evaluation.jsonl]'

FOLDER gets ``calibration.safetensors`` and a file for each text of the evaluation; each holds ``ids``,
``[segments, length]``.
"""

import tempfile
from pathlib import Path

from jsonargparse import auto_cli
from safetensors.torch import save_file
from transformers import AutoTokenizer

from aespa_pl.data.tokens import calibration_tokens, evaluation_tokens
from aespa_pl.settings import CalibrationSettings, EvaluationSettings

LENGTH = 2048
"""Tokens in a segment where the settings say nothing."""


def main(
    model: str,
    folder: Path,
    *,
    calibration: CalibrationSettings,
    evaluation: EvaluationSettings,
    bos: bool = False,
) -> None:
    """Write the files.

    Args:
        model: Folder of the model, for its tokenizer.
        folder: Where they are written.
        calibration: As ``data.calibration`` of a run.
        evaluation: As ``data.evaluation`` of a run.
        bos: As ``data.bos`` of a run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(model)
    first = tokenizer.bos_token_id if bos else None
    with tempfile.TemporaryDirectory() as temporary:
        cache = Path(temporary)
        found = {
            "calibration": calibration_tokens(
                calibration, tokenizer, calibration.segment_length or LENGTH, cache, bos=first
            )
        }
        for name in evaluation.names:
            found[Path(name).stem] = evaluation_tokens(
                name,
                tokenizer,
                evaluation.segment_length or LENGTH,
                evaluation.max_segments,
                cache,
                bos=first,
            )
    for name, tokens in found.items():
        save_file({"ids": tokens}, folder / f"{name}.safetensors")
        print(folder / f"{name}.safetensors", list(tokens.shape))


if __name__ == "__main__":
    auto_cli(main)
