"""Measure a model that GPTQModel has quantized, on the tokens that our comparisons take.

It runs in an environment of its own, without aespa_pl:

    python -m venv peer
    peer/bin/pip install gptqmodel safetensors jsonargparse docstring-parser
    peer/bin/python benchmarks/peer_gptqmodel.py MODEL '[EVAL.safetensors]' CALIBRATION.safetensors

The settings are GPTQModel's defaults, but asymmetric integers, as in our tables. The integers are
multiplied out, and the model runs in float32. Seconds are processor seconds of the quantization. On two
cores GPTQModel 7.7.0 begins only with ``GPTQMODEL_CPU_WORKERS=2`` in the environment.
"""

import time
from pathlib import Path

import torch
from jsonargparse import auto_cli
from peer_auto_round import library, perplexities, report
from safetensors.torch import load_file
from torch import nn


def main(
    model: str,
    evaluation: list[str],
    calibration: str,
    *,
    bits: int = 4,
    group_size: int = -1,
    mse: float = 0.0,
    desc_act: bool = False,
    threads: int = 1,
    segments: int | None = None,
    output: str | None = None,
) -> None:
    """Quantize with GPTQModel and print perplexities and seconds.

    Args:
        model: Folder of the model.
        evaluation: Files with ``ids``, the tokens of a held-out text.
        calibration: File with ``ids`` ``[segments, L]``, the calibration segments.
        bits: Of each weight.
        group_size: Weights that share a scale; -1 is one scale for each row.
        mse: Exponent of the errors in GPTQModel's search of scales; 0: min-max scales, its default.
        desc_act: Quantize columns in the order of H's diagonal.
        threads: Threads of torch.
        segments: Use only the first so many segments of the evaluation.
        output: A JSON line is appended to this file.
    """
    gptqmodel = library("gptqmodel", "gptqmodel")
    torch.set_num_threads(threads)
    tokens = load_file(calibration)["ids"].long()
    chosen = gptqmodel.QuantizeConfig(
        bits=bits,
        group_size=group_size,
        sym=False,
        mse=mse,
        desc_act=desc_act,
        format="gptq_v2",
        offload_to_disk=False,
    )
    loaded = gptqmodel.GPTQModel.load(model, chosen, device="cpu")
    start = time.process_time()
    loaded.quantize(
        [{"input_ids": s[None], "attention_mask": torch.ones_like(s[None])} for s in tokens], batch_size=1
    )
    seconds = time.process_time() - start
    network = multiplied_out(loaded.model)
    row = {
        "peer": f"GPTQModel {gptqmodel.__version__}",
        "model": Path(model).name,
        "calibration": Path(calibration).name,
        "bits": bits,
        "group_size": group_size,
        "mse": mse,
        "desc_act": desc_act,
        "perplexity": perplexities(network, evaluation, tokens.shape[1], segments),
        "processor_seconds": round(seconds, 1),
    }
    report(row, output)


@torch.no_grad()
def multiplied_out(network: nn.Module) -> nn.Module:
    """Put a linear module with the values of the integers in place of each quantized one."""
    for name, module in [*network.named_modules()]:
        if hasattr(module, "dequantize_weight"):
            weight = module.dequantize_weight().float().T.contiguous()  # [d_out, d_in]
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=module.bias is not None)
            linear.weight.copy_(weight)
            if module.bias is not None:
                linear.bias.copy_(module.bias)
            parent, _, leaf = name.rpartition(".")
            setattr(network.get_submodule(parent), leaf, linear)
    return network.float().eval()


if __name__ == "__main__":
    auto_cli(main)
