"""What the reader of a benchmark must know of the machine: its CPU, its clock policy, and what disturbed the run."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..kernels.target import current_target


@cache
def cpu_name() -> str:
    """The CPU's name as its maker writes it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    if sys.platform == "darwin":
        asked = subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False
        )
        if asked.stdout.strip():
            return asked.stdout.strip()
    return platform.processor() or platform.machine()


def cpu_target() -> str:
    """What kernels are compiled for: LLVM's name of the CPU, and the dot product it has."""
    target = current_target()
    return f"{target.cpu}, {target.dot}"


def governor() -> str | None:
    """The policy by which the system sets the CPU's clock; None where it does not tell."""
    try:
        return Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").read_text().strip()
    except OSError:
        return None


def memory_bytes() -> int | None:
    """The machine's memory; None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def has_steady_clock() -> bool:
    """Whether the counter behind the stamps runs at one rate on all cores; True where nothing says otherwise."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return True
    flags = next((line.split() for line in info.splitlines() if line.startswith("flags")), None)
    return flags is None or "constant_tsc" in flags


@dataclass(frozen=True)
class Disturbances:
    """Counts since the process began: pages read from disk, pages first touched, and processors taken away."""

    major_faults: int
    minor_faults: int
    preemptions: int

    @classmethod
    def so_far(cls) -> Disturbances:
        """The counts now; zeros on systems that do not count."""
        if os.name != "posix":
            return cls(0, 0, 0)
        import resource

        usage = resource.getrusage(resource.RUSAGE_SELF)
        return cls(usage.ru_majflt, usage.ru_minflt, usage.ru_nivcsw)

    def __sub__(self, earlier: Disturbances) -> Disturbances:
        return Disturbances(
            self.major_faults - earlier.major_faults,
            self.minor_faults - earlier.minor_faults,
            self.preemptions - earlier.preemptions,
        )
