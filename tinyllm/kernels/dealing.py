"""How threads share the units of an op: each half of the threads has a half of them, and helps the other at the end.

So a thread meets the same rows in op after op and finds them in its own caches, reads its weights in one stream, and
yet no thread waits while there is work: whoever is done takes the last units that the others have not begun.
"""

from __future__ import annotations

from .abi import TICKETS
from .simd import atomic_add, store_i64
from .specialize import inline

# A ticket word counts what was drawn from the first unit of its half on below this, and from the last on in multiples.
_FROM_LAST = 2**32


@inline
def draw(tickets, thread, n_threads, n_units):
    """Number of the next unit for this thread, or -1 if all are dealt out."""
    n_low = (n_threads + 1) // 2
    middle = n_units * n_low // n_threads
    low = thread < n_low
    before = atomic_add(tickets + (TICKETS[0] if low else TICKETS[1]), 1)
    taken = before % _FROM_LAST
    if taken + before // _FROM_LAST < (middle if low else n_units - middle):
        return taken if low else middle + taken
    if n_threads == 1:
        return -1
    before = atomic_add(tickets + (TICKETS[1] if low else TICKETS[0]), _FROM_LAST)
    taken = before // _FROM_LAST
    if taken + before % _FROM_LAST < (n_units - middle if low else middle):
        return (n_units if low else middle) - 1 - taken
    return -1


@inline
def reset_tickets(arguments):
    """Deal the units of an op out anew."""
    store_i64(arguments + TICKETS[0], 0)
    store_i64(arguments + TICKETS[1], 0)
