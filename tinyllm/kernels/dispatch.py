"""An op that calls another kernel for each of some argument blocks: heads with matrices of their own, chosen experts.

All threads go through the blocks in order and share each one's work by its ticket counter; there is no barrier between
blocks, because they write to different places.
"""

from __future__ import annotations

from .abi import DISPATCH, Arguments
from .dealing import reset_tickets
from .simd import atomic_add, call_kernel, load_i64
from .specialize import inline, specialize, static


@inline
def block_of(blocks, groups, i):
    number = load_i64(groups + 8 * i) if groups != 0 else i
    return blocks + number * BLOCK_BYTES


def dispatch(args, thread, n_threads):
    """Call the kernel for one row or for many with each block; the last thread to leave resets their tickets."""
    n_groups = load_i64(load_i64(args + static(A.n_groups)))
    groups = load_i64(args + static(A.groups))
    blocks = load_i64(args + static(A.blocks))
    one = load_i64(args + static(A.one))
    many = load_i64(args + static(A.many))
    for i in range(n_groups):
        block = block_of(blocks, groups, i)
        rows = load_i64(load_i64(block + static(A.n_rows)))
        call_kernel(one if rows == 1 else many, block, thread, n_threads)
    if atomic_add(args, 1) == n_threads - 1:
        for i in range(n_groups):
            reset_tickets(block_of(blocks, groups, i))


BLOCK_BYTES = 8 * Arguments.WORDS

KERNELS = {"dispatch": lambda: specialize(dispatch, A=DISPATCH)}
