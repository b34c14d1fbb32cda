"""List the methods of quantization, which have a file each; ``METHODS`` has them by name.

A new method is a file here and a line below. What a method decides can be set to something else with the
setting of that meaning; :func:`aespa_pl.resolve.resolved` brings both together.
"""

from aespa_pl.methods import (
    adaround,
    aespa,
    aespa_fast,
    aespa_hybrid,
    aespa_tuned,
    affinequant,
    awq,
    boa,
    brecq,
    omniquant,
    optq,
    rtn,
    zfold,
)
from aespa_pl.methods.method import Method

METHODS: dict[str, Method] = {
    module.METHOD.name: module.METHOD
    for module in (
        rtn,
        optq,
        zfold,
        awq,
        adaround,
        brecq,
        omniquant,
        affinequant,
        boa,
        aespa_fast,
        aespa_hybrid,
        aespa,
        aespa_tuned,
    )
}
"""Each method by the value of quantization.method, in the order of tables."""
