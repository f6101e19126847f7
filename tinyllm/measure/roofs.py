"""What the machine can do at most: a team of threads goes in, measured memory bandwidth and arithmetic peaks come out.

With them a time can be compared with the least time that the same bytes and operations would need (the roofline model,
Williams, Waterman & Patterson 2009).
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ..buffers import huge_zeros
from ..kernels import abi
from ..kernels.jit import kernel_addresses
from ..team import Team
from .costs import Work

_REPETITIONS = 5
_CHUNK_BYTES = 1 << 20
_CHUNKS_PER_THREAD = 256
# A multiple of the independent sums that the probes have on any target (5 or 12).
_VECTORS = 60_000
_INT8_PER_VECTOR, _F32_PER_VECTOR = 2 * 64, 2 * 16
# Two measurements that differ by more were not made on a quiet machine.
_NOISE = 0.10


@dataclass(frozen=True)
class Roofs:
    """Limits of the machine with a given number of threads.

    `read_gb_s`: 10^9 bytes read from memory per second; `int8_gop_s`: 10^9 int8 operations per second (a multiplication
    and an addition are two); `f32_gflop_s`: the same in float32.
    """

    read_gb_s: float
    int8_gop_s: float
    f32_gflop_s: float

    def times(self, work: Work) -> dict[str, float]:
        """Seconds that each resource needs for the work at least, by the resource's name."""
        return {
            "mem": work.n_bytes / (self.read_gb_s * 1e9),
            "int8": work.int8_ops / (self.int8_gop_s * 1e9),
            "f32": work.f32_ops / (self.f32_gflop_s * 1e9),
        }

    def as_dict(self) -> dict[str, float]:
        return {name: round(value, 2) for name, value in asdict(self).items()}


@dataclass(frozen=True)
class RoofPair:
    """Roofs measured before and after a test."""

    before: Roofs
    after: Roofs

    @property
    def best(self) -> Roofs:
        """The higher value of each: it was reached, so it is possible."""
        return Roofs(*(max(pair) for pair in self._pairs()))

    @property
    def worst(self) -> Roofs:
        return Roofs(*(min(pair) for pair in self._pairs()))

    @property
    def noisy(self) -> bool:
        """Whether somebody else used the machine: the two measurements differ by more than 10 %."""
        return any(max(pair) > (1 + _NOISE) * min(pair) for pair in self._pairs())

    def _pairs(self) -> list[tuple[float, float]]:
        return list(zip(asdict(self.before).values(), asdict(self.after).values(), strict=True))


class Prober:
    """Measures roofs with the threads of a team, as often as asked. Holds a buffer of at least 256 MiB until closed."""

    def __init__(self, team: Team):
        self._team = team
        self._kernels = kernel_addresses(["probes.read", "probes.dot", "probes.fma"])
        self._buffer = huge_zeros(probe_bytes())
        # 0x3c3c3c3c is 0.0115 as a float: no probe meets infinities or subnormals.
        self._buffer.fill(0x3C)
        self._result = np.zeros(64 * (team.n_threads + 1), np.uint8)
        self._many = np.array([2], np.int64)

    def measure(self) -> Roofs:
        """The best of five runs of each probe, about half a second in all."""
        n_bytes = self._buffer.size
        n_chunks = _CHUNKS_PER_THREAD * self._team.n_threads
        n_vectors = n_chunks * _VECTORS
        return Roofs(
            read_gb_s=n_bytes / self._seconds("probes.read", n_bytes // _CHUNK_BYTES) / 1e9,
            int8_gop_s=n_vectors * _INT8_PER_VECTOR / self._seconds("probes.dot", n_chunks) / 1e9,
            f32_gflop_s=n_vectors * _F32_PER_VECTOR / self._seconds("probes.fma", n_chunks) / 1e9,
        )

    def _seconds(self, name: str, n_chunks: int) -> float:
        arguments = np.array(
            abi.PROBE.pack(
                n_rows=self._many.ctypes.data,
                memory=self._buffer.ctypes.data,
                n_chunks=n_chunks,
                chunk_bytes=_CHUNK_BYTES,
                vectors=_VECTORS,
                result=self._result.ctypes.data + -self._result.ctypes.data % 64,
            ),
            np.int64,
        )
        kernel = self._kernels[name]
        table = np.zeros((1, abi.OP_BYTES // 8), np.int64)
        table[0, :4] = kernel, kernel, arguments.ctypes.data, self._many.ctypes.data
        best = float("inf")
        for _ in range(_REPETITIONS):
            started = time.perf_counter()
            self._team.run(table)
            best = min(best, time.perf_counter() - started)
        return best

    def close(self) -> None:
        """Give the buffer back."""
        self._buffer = None


def probe_bytes() -> int:
    """Size of the buffer that is read: four times the last-level cache, but 256 MiB at least and 2 GiB at most."""
    largest = 0
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            size = (index / "size").read_text().strip()
            largest = max(largest, int(size.rstrip("K")) * 1024)
        except (OSError, ValueError):
            continue
    return min(max(256 << 20, 4 * largest) // _CHUNK_BYTES * _CHUNK_BYTES, 2 << 30)
