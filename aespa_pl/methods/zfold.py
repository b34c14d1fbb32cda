"""Z-Fold has grids with a column factor that is folded away, then OPTQ's integers.

With ``quantization.objective.value attention`` the value projection takes its attention-wise Hessian.
"""

from aespa_pl.methods.method import Method

METHOD = Method(name="zfold", source="EMNLP 2023 main 892", search=True, zfold=True, optq=True)
