"""The paged cache of keys and values: pools of fixed-size pages, and sequences that own lists of page numbers.

A page number names the same 32 positions in all layers of a group: those with the same window. Windowed layers give
back the pages that no token can see any more. Forked sequences share their full pages.
"""

from __future__ import annotations

import numpy as np

from .config import ModelConfig
from .errors import ContextFullError, InvalidParameterError
from .kernels.abi import CACHE_TYPES, PAGE
from .state_cache import StatePool


class LayerPool:
    """Geometry and memory of one layer's pages: per KV head keys [head_dim][32], then values [32][v_dim padded].

    `block_bytes` is the size of 32 numbers; `kernels/cache_types.py` says where scales lie. `group` is the number of
    its `PageGroup`.
    """

    def __init__(self, n_kv_heads: int, head_dim: int, v_dim: int, block_bytes: int, n_pages: int, group: int):
        v_blocks = -(-v_dim // 32)
        self.v_offset = head_dim * PAGE // 32 * block_bytes
        self.head_bytes = self.v_offset + v_blocks * PAGE * block_bytes
        self.page_bytes = n_kv_heads * self.head_bytes
        self.group = group
        # Zeroed by the system as pages are first touched: values behind the end of a sequence must be finite.
        self.memory = np.zeros(n_pages * self.page_bytes + 64, np.uint8)
        self.address = self.memory.ctypes.data + -self.memory.ctypes.data % 64

    def page(self, number: int) -> np.ndarray:
        """A page's memory: uint8 [page_bytes]."""
        start = self.address - self.memory.ctypes.data + number * self.page_bytes
        return self.memory[start : start + self.page_bytes]


class PageGroup:
    """The pages of layers with the same `window` (0: all positions), and who uses them."""

    def __init__(self, window: int, n_pages: int):
        self.window, self.n_pages = window, n_pages
        self.layers: list[LayerPool] = []
        self._free = list(range(n_pages - 1, -1, -1))
        self._users = [0] * n_pages

    @property
    def n_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free page.

        Raises ContextFullError when all are in use.
        """
        if not self._free:
            raise ContextFullError(
                f"the cache is full: all {self.n_pages * PAGE} positions are in use by open sequences; release some"
            )
        page = self._free.pop()
        self._users[page] = 1
        return page

    def share(self, page: int) -> None:
        self._users[page] += 1

    def release(self, page: int) -> None:
        self._users[page] -= 1
        if self._users[page] == 0:
            self._free.append(page)

    def own(self, page: int) -> int:
        """This page if nobody else uses it, or a copy of it in its place."""
        if self._users[page] == 1:
            return page
        copy = self.take()
        for layer in self.layers:
            layer.page(copy)[:] = layer.page(page)
        self.release(page)
        return copy


class KVCache:
    """Pools of all layers, in groups. `n_pages` bounds all sequences together."""

    def __init__(self, config: ModelConfig, n_pages: int, kv_type: str):
        _check_type(config, kv_type)
        self.kv_type = kv_type
        self.n_pages = n_pages
        windows = sorted({layer.window for layer in config.layers})
        self.groups = [PageGroup(window, n_pages) for window in windows]
        self.layers = []
        for layer in config.layers:
            group = windows.index(layer.window)
            # Latent attention's values are part of its keys.
            v_dim = 0 if layer.mixer == "latent" else layer.v_dim
            block_bytes = CACHE_TYPES[kv_type].block_bytes
            pool = LayerPool(layer.n_kv_heads, layer.head_dim, v_dim, block_bytes, n_pages, group)
            self.layers.append(pool)
            self.groups[group].layers.append(pool)
        # Recurrent layers keep a state per sequence instead of pages.
        self.states = StatePool(config.state_bytes) if config.recurrent else None

    @property
    def n_free(self) -> int:
        """Pages that are free in every group."""
        return min(group.n_free for group in self.groups)


def _check_type(config: ModelConfig, kv_type: str) -> None:
    """Raises InvalidParameterError for a type that is unknown or that the model's heads cannot be kept in."""
    if kv_type not in CACHE_TYPES:
        raise InvalidParameterError(f"kv_type {kv_type!r} is unknown: use one of {', '.join(CACHE_TYPES)}")
    sizes = {size for layer in config.attention_layers for size in (layer.head_dim, layer.v_dim)}
    fitting = [
        name for name, cache_type in CACHE_TYPES.items() if all(size % cache_type.multiple == 0 for size in sizes)
    ]
    if kv_type not in fitting:
        multiple = CACHE_TYPES[kv_type].multiple
        odd = min(size for size in sizes if size % multiple)
        raise InvalidParameterError(
            f"kv_type {kv_type!r} needs heads of a multiple of {multiple} numbers, and this model has heads of {odd}:"
            f" use {' or '.join(fitting)}"
        )


class _Pages:
    """The pages of a sequence in one group, in order of position from page number `first` of the sequence on."""

    def __init__(self, group: PageGroup, n_ctx: int):
        self.group = group
        self.first = 0
        self.numbers: list[int] = []
        # What kernels read: the number of each page of the sequence.
        self.table = np.zeros(-(-n_ctx // PAGE) + 1, np.int32)

    @property
    def end(self) -> int:
        return self.first + len(self.numbers)

    def needed_from(self, position: int) -> int:
        """The first page that a token at this position sees."""
        return max(0, position - self.group.window + 1) // PAGE if self.group.window else 0

    def reserve(self, n_positions: int, writable_from: int) -> None:
        shared = writable_from // PAGE
        if shared < self.end:
            self._set(shared, self.group.own(self.numbers[shared - self.first]))
        while self.end * PAGE < n_positions:
            self._set(self.end, self.group.take())

    def _set(self, index: int, page: int) -> None:
        at = index - self.first
        self.numbers[at : at + 1] = [page]
        self.table[index] = page

    def forget(self, n_pages: int) -> None:
        """Give back the sequence's first pages."""
        while self.first < n_pages and self.numbers:
            self.group.release(self.numbers.pop(0))
            self.first += 1

    def truncate(self, n_positions: int) -> None:
        keep = max(0, -(-n_positions // PAGE) - self.first)
        for page in self.numbers[keep:]:
            self.group.release(page)
        del self.numbers[keep:]
        if n_positions == 0:
            self.first = 0

    def copy_to(self, other: _Pages) -> None:
        other.first = self.first
        for page in self.numbers:
            self.group.share(page)
            other._set(other.end, page)


class PageTable:
    """The pages of one sequence. `position`: how many positions have been computed and can be continued from.

    `whole`: keep all positions in windowed layers too, for those who want to look at them.
    """

    def __init__(self, cache: KVCache, n_ctx: int, whole: bool = False):
        self._groups = [_Pages(group, n_ctx) for group in cache.groups]
        # One page table for each group; the kernels index this list.
        self._tables = np.array([pages.table.ctypes.data for pages in self._groups], np.int64)
        self.address = self._tables.ctypes.data
        self.position = 0
        # Positions from … to whose pages belong to this sequence alone.
        self._owned = range(0)
        self._windowed = [] if whole else [pages for pages in self._groups if pages.group.window]

    def numbers(self, group: int) -> list[int]:
        """The pages in a group, of a sequence that keeps all of them."""
        return self._groups[group].numbers

    def reserve(self, n_positions: int, writable_from: int) -> None:
        """Have pages for `n_positions`; those from `writable_from` on belong to this sequence alone."""
        if writable_from in self._owned and n_positions <= self._owned.stop:
            return
        for pages in self._groups:
            pages.reserve(n_positions, writable_from)
        self._owned = range(writable_from, min(pages.end for pages in self._groups) * PAGE)

    def commit(self, n_positions: int) -> None:
        """So many positions are computed: give back what the windows have left behind.

        A page more than the windows need is kept, so that the last few tokens can be taken back.
        """
        self.position = n_positions
        for pages in self._windowed:
            pages.forget(pages.needed_from(n_positions - PAGE))

    def truncate(self, n_positions: int) -> None:
        """Keep the first `n_positions` if the windows before them are still there, else nothing."""
        n_positions = min(n_positions, self.position)
        if any(pages.first > pages.needed_from(n_positions) for pages in self._groups):
            n_positions = 0
        for pages in self._groups:
            pages.truncate(n_positions)
        self.position = n_positions
        self._owned = range(0)

    def copy_to(self, other: PageTable) -> None:
        """Share all pages with another, empty table."""
        self._owned = range(0)
        for pages, others in zip(self._groups, other._groups, strict=True):
            pages.copy_to(others)
        other.position = self.position
