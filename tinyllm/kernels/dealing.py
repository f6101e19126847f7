"""How threads share the units of an op: half of them draw from the first on, the others from the last on.

So a thread meets the same rows in op after op and finds them in its own caches, and yet no thread waits while there is
work: whoever is faster comes further.
"""

from __future__ import annotations

from .simd import atomic_add
from .specialize import inline

# The ticket word counts what was drawn from the first unit on below this, and from the last on in multiples of it.
_FROM_LAST = 2**32


@inline
def draw(ticket, thread, n_threads, n_units):
    """Number of the next unit for this thread, or -1 if all are dealt out."""
    from_last = 2 * thread >= n_threads and thread > 0
    before = atomic_add(ticket, _FROM_LAST if from_last else 1)
    last, first = before // _FROM_LAST, before % _FROM_LAST
    if first + last >= n_units:
        return -1
    return n_units - 1 - last if from_last else first
