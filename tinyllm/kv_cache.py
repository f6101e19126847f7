"""The paged cache of keys and values: a pool of fixed-size pages per layer, and sequences that own lists of page numbers.

A page number names the same 32 positions in every layer. Forked sequences share their full pages.
"""

from __future__ import annotations

import numpy as np

from .config import ModelConfig
from .errors import ContextFullError, InvalidParameterError
from .kernels.abi import PAGE
from .state_cache import StatePool

ELEMENT_BYTES = {"f16": 2, "f32": 4}


class LayerPool:
    """Geometry and memory of one layer's pages: per KV head keys [head_dim][32], then values [32][v_dim padded]."""

    def __init__(self, n_kv_heads: int, head_dim: int, v_dim: int, element: int, n_pages: int):
        v_padded = -(-v_dim // 32) * 32
        self.v_offset = head_dim * PAGE * element
        self.head_bytes = self.v_offset + PAGE * v_padded * element
        self.page_bytes = n_kv_heads * self.head_bytes
        self.group = 0
        # Zeroed by the system as pages are first touched: values behind the end of a sequence must be finite.
        self.memory = np.zeros(n_pages * self.page_bytes + 64, np.uint8)
        self.address = self.memory.ctypes.data + -self.memory.ctypes.data % 64


class KVCache:
    """Pools of all layers and the free pages. `n_pages` bounds all sequences together."""

    def __init__(self, config: ModelConfig, n_pages: int, kv_type: str):
        if kv_type not in ELEMENT_BYTES:
            raise InvalidParameterError(f"kv_type {kv_type!r} is unknown: use one of {', '.join(ELEMENT_BYTES)}")
        self.kv_type = kv_type
        self.n_pages = n_pages
        self.layers = [
            # Latent attention's values are part of its keys.
            LayerPool(
                layer.n_kv_heads, layer.head_dim, 0 if layer.mixer == "latent" else layer.v_dim, ELEMENT_BYTES[kv_type], n_pages
            )
            for layer in config.layers
        ]
        # Recurrent layers keep a state per sequence instead of pages.
        self.states = StatePool(config.state_bytes) if config.recurrent else None
        self._free = list(range(n_pages - 1, -1, -1))
        self._users = [0] * n_pages

    @property
    def bytes_per_page(self) -> int:
        """Bytes of 32 positions over all layers."""
        return sum(layer.page_bytes for layer in self.layers)

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

    def copy_page(self, source: int, target: int) -> None:
        """Copy the content of a page in all layers."""
        for layer in self.layers:
            start = layer.address - layer.memory.ctypes.data
            size = layer.page_bytes
            pages = layer.memory[start : start + self.n_pages * size].reshape(self.n_pages, size)
            pages[target] = pages[source]


class PageTable:
    """The pages of one sequence, in order of position, in memory that kernels read."""

    def __init__(self, cache: KVCache, n_ctx: int):
        self.cache = cache
        self.pages: list[int] = []
        self._numbers = np.zeros(-(-n_ctx // PAGE) + 1, np.int32)
        # One page table for each group of layers with pages of their own; the kernels index this list.
        self._tables = np.array([self._numbers.ctypes.data], np.int64)

    @property
    def address(self) -> int:
        return self._tables.ctypes.data

    def reserve(self, n_positions: int, writable_from: int) -> None:
        """Have pages for `n_positions`; those from `writable_from` on belong to this sequence alone."""
        first = writable_from // PAGE
        if first < len(self.pages) and self.cache._users[self.pages[first]] > 1:
            page = self.cache.take()
            self.cache.copy_page(self.pages[first], page)
            self.cache.release(self.pages[first])
            self._set(first, page)
        while len(self.pages) * PAGE < n_positions:
            self._set(len(self.pages), self.cache.take())

    def _set(self, index: int, page: int) -> None:
        self.pages[index : index + 1] = [page]
        self._numbers[index] = page

    def truncate(self, n_positions: int) -> None:
        """Give back the pages behind `n_positions`."""
        keep = -(-n_positions // PAGE)
        for page in self.pages[keep:]:
            self.cache.release(page)
        del self.pages[keep:]

    def copy_to(self, other: PageTable) -> None:
        """Share all pages with another, empty table."""
        for page in self.pages:
            self.cache.share(page)
            other._set(len(other.pages), page)
