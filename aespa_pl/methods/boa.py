"""BoA is OPTQ that knows the attention scores, so that rows of a head make up for each other.

The value projection takes its attention-wise Hessian; the output projection's share in the paper's loss of
it, which couples its rows, is left out here as in aespa's.
"""

from aespa_pl.methods.method import Method

METHOD = Method(
    name="boa",
    source="arXiv 2406.13474",
    search=True,
    optq=True,
    optq_rows=True,
    query_key="attention",
    value="attention",
)
