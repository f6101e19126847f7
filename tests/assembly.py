"""Compiles kernels to assembly for a CPU that need not be the one it runs on: python assembly.py TARGET KERNEL...

Run as a process of its own, because the vocabulary is lowered for one target when it is imported.
"""

from __future__ import annotations

import importlib
import re
import sys

import llvmlite.binding as llvm
from numba import types
from numba.core import compiler
from numba.core.registry import cpu_target

from tinyllm.kernels import target
from tinyllm.kernels.target import Target

TARGETS = {
    "avx512_vnni": Target("x86_64", "icelake-server", "", "avx512_vnni", True),
    "avx512_madd": Target("x86_64", "skylake-avx512", "", "avx512_madd", True),
    "avx_vnni": Target("x86_64", "alderlake", "", "avx_vnni", True),
    "avx2_madd": Target("x86_64", "haswell", "", "avx2_madd", True),
    "neon_dotprod": Target("aarch64", "neoverse-n1", "+dotprod", "neon_dotprod", True),
    "generic": Target("x86_64", "x86-64", "", "generic", False),
    "generic_arm": Target("aarch64", "cortex-a53", "", "generic", True),
}


def assembly(kernel: str, cpu: Target) -> str:
    """Assembly of a kernel (`module.builder:parameter`) for the target that the vocabulary is lowered for."""
    module_name, _, rest = kernel.partition(".")
    builder, _, parameter = rest.partition(":")
    build = importlib.import_module(f"tinyllm.kernels.{module_name}").KERNELS[builder]
    function = build(parameter) if parameter else build()
    flags = compiler.Flags()
    flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.error_model = "numpy"
    parameters = (types.int64,) * function.__code__.co_argcount
    compiled = compiler.compile_extra(
        cpu_target.typing_context, cpu_target.target_context, function, parameters, types.void, flags, {}
    )
    ir = re.sub(r'"(target-cpu|target-features)"="[^"]*"', "", str(compiled.library._final_module))
    ir = re.sub(r"^target (triple|datalayout) = .*$", "", ir, flags=re.MULTILINE)
    triple = f"{cpu.machine}-unknown-linux-gnu"
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu.cpu, features=cpu.features, opt=3)
    module = llvm.parse_assembly(f'target triple = "{triple}"\ntarget datalayout = "{machine.target_data}"\n{ir}')
    return machine.emit_assembly(module)


def main() -> None:
    name, *kernels = sys.argv[1:]
    target.current_target = lambda: TARGETS[name]
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    for kernel in kernels:
        print(assembly(kernel, TARGETS[name]))


if __name__ == "__main__":
    main()
