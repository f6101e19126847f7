"""What the CPU that kernels are compiled for can do: its name, its features, and the dot-product lowering they allow.

The target is Numba's: the host, unless NUMBA_CPU_NAME and NUMBA_CPU_FEATURES say otherwise. Importing this loads
llvmlite only.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import cache

_AVX512_VNNI = frozenset(
    """cascadelake cooperlake icelake-client icelake-server tigerlake rocketlake sapphirerapids emeraldrapids
    graniterapids graniterapids-d diamondrapids znver4 znver5""".split()
)
_AVX512 = frozenset("skylake-avx512 skx cannonlake x86-64-v4".split())
_AVX_VNNI = frozenset(
    """alderlake raptorlake meteorlake arrowlake arrowlake-s lunarlake gracemont sierraforest grandridge
    pantherlake clearwaterforest""".split()
)
_AVX2 = frozenset("haswell core-avx2 broadwell skylake x86-64-v3 znver1 znver2 znver3 bdver4".split())


@dataclass(frozen=True)
class Target:
    """CPU name and feature string as LLVM spells them, and the lowering of the int8 dot product they allow.

    `dot` is one of avx512_vnni, avx_vnni, avx512_madd, avx2_madd, neon_dotprod, generic;
    `f16c`: whether half precision is converted by an instruction.
    """

    machine: str
    cpu: str
    features: str
    dot: str
    f16c: bool

    @property
    def register_bytes(self) -> int:
        """Size of the vector registers that int8 codes are kept in; 8 where nothing but plain LLVM code is used."""
        if self.dot == "generic":
            return 16 if self.machine in ("aarch64", "arm64") else 8
        return {"avx512_vnni": 64, "avx512_madd": 64, "avx_vnni": 32, "avx2_madd": 32, "neon_dotprod": 16}[self.dot]

    @property
    def wide_registers(self) -> bool:
        """Thirty-two registers of 64 bytes (AVX-512), which hold more tokens' accumulators at a time."""
        return self.dot.startswith("avx512")


def _classify(machine: str, cpu: str, features: frozenset[str]) -> tuple[str, bool]:
    if machine in ("aarch64", "arm64"):
        known = cpu.startswith(("apple-", "neoverse-", "cortex-a7", "cortex-x"))
        return ("neon_dotprod" if "dotprod" in features or known else "generic"), True
    if machine not in ("x86_64", "amd64"):
        return "generic", False
    if ("avx512vnni" in features and "avx512bw" in features) or cpu in _AVX512_VNNI:
        return "avx512_vnni", True
    if "avxvnni" in features or cpu in _AVX_VNNI:
        return "avx_vnni", True
    if "avx512bw" in features or cpu in _AVX512:
        return "avx512_madd", True
    if ("avx2" in features and "f16c" in features and "fma" in features) or cpu in _AVX2:
        return "avx2_madd", True
    return "generic", False


@cache
def current_target() -> Target:
    """The target of this process, read once."""
    import llvmlite.binding as llvm

    machine = platform.machine().lower()
    cpu = os.environ.get("NUMBA_CPU_NAME")
    features = os.environ.get("NUMBA_CPU_FEATURES")
    if cpu is None:
        cpu = llvm.get_host_cpu_name()
        if features is None:
            features = llvm.get_host_cpu_features().flatten()
    features = features or ""
    enabled = frozenset(f[1:] for f in features.split(",") if f.startswith("+"))
    dot, f16c = _classify(machine, cpu, enabled)
    return Target(machine, cpu, features, dot, f16c)
