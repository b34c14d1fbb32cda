"""Write the model card, which is the README.md of an exported folder."""

import json
import shlex
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from aespa_pl.evaluation.later import with_later
from aespa_pl.export.format import Format
from aespa_pl.export.quantized import QuantizedModel

USES = {
    "hf": {
        "transformers": (
            'AutoModelForCausalLM.from_pretrained("FOLDER")',
            "python",
        )
    },
    "compressed-tensors": {
        "transformers": (
            'AutoModelForCausalLM.from_pretrained("FOLDER")  # pip install compressed-tensors',
            "python",
        ),
        "vllm": ("vllm serve FOLDER", "sh"),
    },
    "awq": {"vllm": ("vllm serve FOLDER", "sh")},
    "gptq": {
        "gptqmodel": (
            'AutoModelForCausalLM.from_pretrained("FOLDER")  # pip install gptqmodel optimum',
            "python",
        )
    },
    "gguf": {"llama.cpp": ('llama-completion -m FOLDER/model.gguf -p "Once upon a time"', "sh")},
}
"""Code that loads a folder, and its language, by format and engine."""


def model_card(
    model: QuantizedModel, chosen: Format, command: str, verified: Mapping[str, str]
) -> str:
    """Return the text.

    Args:
        model: Model that was exported.
        chosen: The format.
        command: Command that makes the folder again.
        verified: What the check of each engine found, by its name.
    """
    pretrained = model.settings["model"]["pretrained"]
    licence = base_licence(model.original)
    header: dict[str, Any] = {"tags": ["aespa", chosen.name], "pipeline_tag": "text-generation"}
    if not _is_local(pretrained):
        header["base_model"] = pretrained
    if licence is not None:
        header["license"] = licence
    stated = licence or "not stated: the folder of the base model has no card that names one"
    base = Path(pretrained).name
    if not _is_local(pretrained):
        base = f"[{base}](https://huggingface.co/{pretrained})"
    parts = [
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---",
        f"# {Path(pretrained).name}, {model.granularity}, {chosen.name}",
        f"{base} quantized with aespa_pl {version('aespa-pl')}.",
        f"Licence of the base model: {stated}.",
        f"## Method\n\n{_method(model, chosen)}",
        f"## Perplexity\n\n{_perplexities(model.run.folder)}",
        f"## How it was made\n\n{_commands(model, command)}",
        f"## How to load it\n\n{_uses(chosen.name, verified)}",
    ]
    return "\n\n".join(parts) + "\n"


def base_licence(folder: Path) -> str | None:
    """Return the licence that the base model's own card states, None if it states none."""
    card = folder / "README.md"
    if not card.is_file():
        return None
    parts = card.read_text(encoding="utf-8").split("---\n", 2)
    if len(parts) < 3 or parts[0].strip():
        return None
    try:
        header = yaml.safe_load(parts[1])
    except yaml.YAMLError:
        return None
    licence = header.get("license") if isinstance(header, dict) else None
    return None if licence is None else str(licence)


def _is_local(pretrained: str) -> bool:
    return pretrained.startswith("embedded:") or Path(pretrained).expanduser().exists()


def _public_name(source: str) -> str:
    """Return the name of a model or text; of a file or folder on this machine, its last part."""
    return Path(source).name if Path(source).expanduser().exists() else source


def _method(model: QuantizedModel, chosen: Format) -> str:
    settings = model.settings["quantization"]
    data = model.settings["data"]["calibration"]
    others = chosen.rounded(model) or "embedding, head and norms are not quantized"
    return (
        f"{settings['method']}: {model.granularity}; calibrated on {data['segments']} segments of "
        f"{data['segment_length']} tokens of {_public_name(data['source'])}; {others}."
    )


def _commands(model: QuantizedModel, command: str) -> str:
    """Return the settings and the commands; folders of this machine mean nothing to others."""
    data = model.settings["data"]["calibration"]
    settings = {
        "quantization": model.settings["quantization"],
        "data": {"calibration": {**data, "source": _public_name(data["source"])}},
    }
    name = shlex.quote(_public_name(model.settings["model"]["pretrained"]))
    return (
        f"With these settings in `settings.yaml`:\n\n```yaml\n{yaml.safe_dump(settings)}```\n\n```sh\n"
        f"aespa-pl fit --config settings.yaml --model.pretrained {name}\n{command}\n```"
    )


def _perplexities(run: Path) -> str:
    """Return the table of the perplexities that ``fit`` or ``test`` measured."""
    files = (run / "metrics.json", run / "test.json")
    metrics, later = (
        json.loads(f.read_text(encoding="utf-8")) if f.is_file() else {} for f in files
    )
    found = with_later(metrics, later).get("perplexity", {})
    texts = sorted({text for values in found.values() for text in values})
    if not texts:
        return "Not measured."
    rows = [_row(["", *map(_public_name, texts)]), _row(["---"] * (1 + len(texts)))]
    rows += [
        _row([kind, *(f"{values[text]:.3f}" if text in values else "" for text in texts)])
        for kind, values in found.items()
    ]
    return "\n".join(rows)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _uses(name: str, verified: Mapping[str, str]) -> str:
    uses = [
        f"{engine} ({verified[engine]}):\n\n```{language}\n{text}\n```"
        for engine, (text, language) in USES[name].items()
        if engine in verified
    ]
    return "\n\n".join(uses) or "No engine was run when this was exported; see docs/export.md."
