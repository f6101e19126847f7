"""The state of recurrent layers beside the KV pages: a state holds all layers' memories of a sequence at one position.

A step reads a sequence's last state and writes a new one, so a step that was interrupted has changed nothing, forked
sequences share states, and a few older states remain as places to go back to.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# A run of so many tokens is a prompt: the state before it is kept until the next prompt.
PROMPT_ROWS = 32


class State:
    """Memory of all recurrent layers behind the first `position` tokens of a sequence. Filled once, then constant."""

    def __init__(self, n_bytes: int):
        self.position = 0
        self.users = 1
        # Zeroed by the system as pages are first read: the state before the first token costs no memory.
        self._memory = np.zeros(n_bytes + 64, np.uint8)
        self.address = self._memory.ctypes.data + -self._memory.ctypes.data % 64


class StatePool:
    """Hands out states, and takes their memory back when no sequence uses them. `layer_bytes` may be 0 for a layer."""

    def __init__(self, layer_bytes: Sequence[int]):
        sizes = [-(-n_bytes // 64) * 64 for n_bytes in layer_bytes]
        self.offsets = [sum(sizes[:layer]) for layer in range(len(sizes))]
        self.n_bytes = sum(sizes)
        self.start = State(self.n_bytes)
        self._free: list[State] = []

    def take(self) -> State:
        """A state to be filled; its content is undefined."""
        if not self._free:
            return State(self.n_bytes)
        state = self._free.pop()
        state.users = 1
        return state

    def share(self, state: State) -> State:
        state.users += 1
        return state

    def release(self, state: State) -> None:
        state.users -= 1
        if state.users == 0:
            self._free.append(state)


class StateHistory:
    """States of one sequence in order of position: the empty one, a few to go back to, and the last."""

    def __init__(self, pool: StatePool):
        self.pool = pool
        self._states = [pool.share(pool.start)]
        self._next: State | None = None
        self._prompt = 0

    @property
    def position(self) -> int:
        """How many tokens the last state has seen."""
        return self._states[-1].position

    def begin(self, n_rows: int) -> tuple[int, int]:
        """Addresses of the state that a step of `n_rows` reads and of the one that it writes."""
        self._next = self.pool.take()
        self._next.position = self.position + n_rows
        return self._states[-1].address, self._next.address

    def abort(self) -> None:
        """The step was not completed."""
        if self._next is not None:
            self.pool.release(self._next)
            self._next = None

    def commit(self) -> None:
        """The step is done: what it wrote is the last state, and the one before it stays."""
        self._states.append(self._next)
        self._next = None
        kept = {0, self._prompt, *(state.position for state in self._states[-2:])}
        self._keep([state for state in self._states if state.position in kept])

    def mark_prompt(self) -> None:
        """Keep the last state until the next prompt."""
        self._prompt = self.position

    def truncate(self, n: int) -> None:
        """Go back to the last state that has seen no more than n tokens; `position` says how many those are."""
        self._keep([state for state in self._states if state.position <= n])
        self._prompt = min(self._prompt, self.position)

    def copy_to(self, other: StateHistory) -> None:
        """Share all states with another history."""
        other._keep([])
        other._states = [self.pool.share(state) for state in self._states]
        other._prompt = self._prompt

    def _keep(self, states: list[State]) -> None:
        for state in self._states:
            if state not in states:
                self.pool.release(state)
        self._states = states
