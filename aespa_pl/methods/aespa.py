"""aespa has attention-aware grids, start and learned rounding, with three additions of ours.

The additions are ``keep_best``, ``polish`` and ``input_correction``; ``configs/paper.yaml`` switches them
off.
"""

from aespa_pl.methods.method import Method

METHOD = Method(
    name="aespa",
    source="NeurIPS 2024, Towards Next-Level Post-Training Quantization of Hyper-Scale Transformers",
    search=True,
    zfold=True,
    optq=True,
    query_key="attention",
    value="attention",
    learn="all",
    keep_best=True,
    polish=True,
    input_correction=0.5,  # docs/correction.md
)
