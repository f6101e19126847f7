"""The words of the arguments of the kernels in `lens.py`, for those who call them: importing these needs no Numba."""

from __future__ import annotations

from .abi import Arguments

N_TOP = 5

# The N_TOP largest of each row of `sign` · x: their values (float32) and columns (int64), best first.
BEST = Arguments("n x x_stride sign values columns")

# Sums over each row of logits, against the row number `finals[row]` of the same matrix; `values` as BEST left them.
SUMS = Arguments("n x x_stride values finals sums")
SUM_WEIGHTS, SUM_WEIGHTED, SUM_CROSS, SUM_LOGITS, SUMS_BYTES = 0, 4, 8, 12, 16

# How many columns of each row are larger than the column `answers[row]`, or as large and before it.
RANKS = Arguments("n x x_stride answers ranks")
