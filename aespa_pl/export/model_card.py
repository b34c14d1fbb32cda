"""Write the model card, which is the README.md of an exported folder."""

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from urllib.parse import quote

import yaml
from huggingface_hub import ModelCardData, metadata_load

from aespa_pl.errors import printable
from aespa_pl.evaluation.table import markdown, measured, result_table, tokens_in_words
from aespa_pl.export.format import Format
from aespa_pl.export.quantized import QuantizedModel
from aespa_pl.models.hub import is_local
from aespa_pl.models.multimodal import whole_type
from aespa_pl.run.journal import Run

LOAD = """\
from transformers import AutoModelForCausalLM  # pip install {packages}

model = AutoModelForCausalLM.from_pretrained("FOLDER")"""
USES = {
    "hf": {"transformers": (LOAD.format(packages="transformers"), "python")},
    "compressed-tensors": {
        "transformers": (LOAD.format(packages="transformers compressed-tensors"), "python"),
        "vllm": ("vllm serve FOLDER", "sh"),
    },
    "awq": {"vllm": ("vllm serve FOLDER", "sh")},
    "gptq": {"gptqmodel": (LOAD.format(packages="transformers gptqmodel optimum"), "python")},
    "gguf": {"llama.cpp": ('llama-completion -m FOLDER/model.gguf -p "Once upon a time"', "sh")},
}
"""Code that loads a folder, and its language, by format and engine."""


def model_card(
    model: QuantizedModel,
    chosen: Format,
    command: str,
    verified: Mapping[str, str],
    beside: str | None = None,
) -> str:
    """Return the text; ``verified`` has what checks of engines found, ``beside`` what the original's did."""
    pretrained = model.settings.model.pretrained
    licence = _base_licence(model.original)
    header = ModelCardData(
        tags=["aespa", chosen.name],
        pipeline_tag="text-generation",
        base_model=None if is_local(pretrained) else pretrained,
        license=licence,
    )
    stated = "not stated: the folder of the base model has no card that names one"
    name = base = markdown(Path(pretrained).name)
    if not is_local(pretrained):
        base = f"[{name}](https://huggingface.co/{quote(pretrained)})"
    if whole_type(model.original) is not None:
        base = f"The text model of {base}"
    parts = [
        f"---\n{header.to_yaml()}\n---",
        f"# {name}, {model.granularity}, {chosen.name}",
        f"{base} quantized with aespa_pl {model.run.fingerprint.get('version of aespa-pl')}.",
        f"Licence of the base model: {markdown(licence or stated)}.",
        f"## Method\n\n{_method(model, chosen)}",
        f"## Perplexity\n\n{_perplexities(model.run).rstrip()}",
        *([f"Beside the original, on a text that comes with aespa_pl: {beside}."] if beside else []),
        f"## How it was made\n\n{_commands(model, command)}",
        f"## How to load it\n\n{_uses(chosen.name, verified)}",
    ]
    return "\n\n".join(parts) + "\n"


def _base_licence(folder: Path) -> str | None:
    try:
        licence = (metadata_load(folder / "README.md") or {}).get("license")
    except (OSError, ValueError, RecursionError, yaml.YAMLError):  # ValueError: bytes, no text
        return None
    return None if licence is None else str(licence)


def _public_name(source: str) -> str:
    """Return the name of a model or text; of a file or folder on this machine, its last part."""
    return Path(source).name if is_local(source) else source


def _public_names(sources: Iterable[str]) -> dict[str, str]:
    """Return the public name of each text; later ones that share their file's name are numbered."""
    names: dict[str, str] = {}
    for source in sources:
        name = _public_name(source)
        before = [*map(_public_name, names)].count(name)
        names[source] = f"{name} ({before + 1})" if before else name
    return names


def public_source(source: str | Mapping[str, float]) -> str | dict[str, float]:
    """Return the calibration text or texts by their public names."""
    if isinstance(source, str):
        return _public_name(source)
    names = _public_names(source)
    return {names[text]: proportion for text, proportion in source.items()}


def _method(model: QuantizedModel, chosen: Format) -> str:
    data, method = model.settings.data.calibration, model.quantization.method
    source = public_source(data.source)
    if isinstance(source, dict):
        source = ", ".join(f"{name} ({proportion:g})" for name, proportion in source.items())
    types = {part: model.stem_type(name) for part, name in model.parts.items()}
    typed = [f"{part} in {kind}" for part, kind in types.items() if kind is not None]
    rounded = chosen.rounded(model)
    ends = [part for part, kind in types.items() if kind is None and rounded is None]
    kept = ", ".join([*ends, *_kept(model), "norms"])
    others = "; ".join([*typed, *([rounded] if rounded else []), f"not quantized: {kept}"])
    calibrated = ""
    if method != "rtn":  # which looks at no text
        length = data.segment_length or model.family.positions(model.pretrained.config)
        calibrated = f" calibrated on {data.segments} segments of {length} tokens of {markdown(source)};"
    return f"{method}: {model.granularity};{calibrated} {others}."


def _kept(model: QuantizedModel) -> list[str]:
    """Return the matrices of blocks that are not quantized, such as routers, by the ends of their names."""
    tensors, blocks = model.pretrained.tensors, range(model.block_count)
    names = (name for index in blocks for name in model.pretrained.block_names(index))
    kept = (name for name in names if len(tensors[name].shape) > 1 and name not in model.matrices)
    return list(dict.fromkeys(".".join(name.removesuffix(".weight").split(".")[-2:]) for name in kept))


def _commands(model: QuantizedModel, command: str) -> str:
    """Return the settings and the commands; folders of this machine mean nothing to others."""
    given = model.settings.data
    data, held_out = given.calibration, given.evaluation
    origin, texts = model.settings.model, [_public_name(text) for text in held_out.names]
    settings = {
        "model": {"revision": origin.revision, "dtype": origin.dtype},
        "quantization": asdict(model.quantization),
        "data": {
            "calibration": {**asdict(data), "source": public_source(data.source)},
            "evaluation": {**asdict(held_out), "texts": texts},
            "bos": given.bos,
            "batch_size": given.batch_size,
        },
    }
    text = yaml.safe_dump(json.loads(json.dumps(settings)))  # plain numbers only
    name = shlex.quote(printable(_public_name(origin.pretrained)))
    return (
        f"With these settings in `settings.yaml`:\n\n```yaml\n{text}```\n\n```sh\n"
        f"aespa-pl fit --config settings.yaml --model.pretrained {name}\n{command}\n```"
    )


def _perplexities(run: Run) -> str:
    metrics, _ = measured(run.folder)
    measurements = metrics.get("perplexity", {})
    names = _public_names(dict.fromkeys(text for values in measurements.values() for text in values))
    perplexities = {
        kind: {names[text]: value for text, value in values.items()} for kind, values in measurements.items()
    }
    table = result_table({"perplexity": perplexities})
    if not table.rows:
        return "Not measured."
    tokens = metrics.get("tokens", {})
    on = [f"{tokens_in_words(tokens[text])} of {markdown(names[text])}" for text in names if text in tokens]
    return table.markdown() + (f"\nMeasured on {', '.join(on)}." if on else "")


def _uses(name: str, verified: Mapping[str, str]) -> str:
    uses = [
        f"{engine} ({verified[engine]}):\n\n```{language}\n{text}\n```"
        for engine, (text, language) in USES[name].items()
        if engine in verified
    ]
    return "\n\n".join(uses) or "No engine was run when this was exported; see docs/export.md."
