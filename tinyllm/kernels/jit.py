"""Compiles kernels with Numba once, keeps their object code in the cache folder, and loads it with llvmlite alone.

A kernel's name is `module.builder:parameter`, e.g. `matmul.gemv:Q4_1`. The cache is keyed by the sources that the
kernel is made of, the CPU and its features, and the compilers' versions; a process that finds everything never
imports numba.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import importlib.util
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm

from ..errors import KernelError
from .target import current_target

log = logging.getLogger("tinyllm")

_loaded: dict[str, int] = {}
_engines: list[llvm.ExecutionEngine] = []
_kept: list[object] = []
_compiling: list[float] = []
_SIBLING_IMPORT = re.compile(r"^\s*from \.(?:(\w+) import| import ([\w, ]+))", re.MULTILINE)


@cache
def _environment_key() -> str:
    """Names what object code depends on besides its sources: the CPU, its features, and the compilers' versions."""
    state = repr((sys.version_info[:2], llvmlite.__version__, _numba_version(), current_target(), sys.platform))
    return hashlib.sha256(state.encode()).hexdigest()[:16]


def _numba_version() -> bytes:
    """The file that tells it: to import numba takes 0.25 s, and `importlib.metadata` 0.03 s."""
    spec = importlib.util.find_spec("numba")
    if spec is None or spec.origin is None:
        return b""
    try:
        return Path(spec.origin).with_name("_version.py").read_bytes()
    except OSError:
        from importlib.metadata import version

        return version("numba").encode()


@cache
def _source_key(module: str) -> str:
    """Names the source of a kernel module, of all kernel modules that it imports, and of this one."""
    folder = Path(__file__).parent
    sources: dict[str, bytes] = {}
    pending = [module, "jit"]
    while pending:
        name = pending.pop()
        if name in sources:
            continue
        sources[name] = (folder / f"{name}.py").read_bytes()
        for one, several in _SIBLING_IMPORT.findall(sources[name].decode()):
            pending += [one] if one else [part.split()[0] for part in several.split(",")]
    digest = hashlib.sha256()
    for name in sorted(sources):
        digest.update(name.encode() + b"\0" + sources[name] + b"\0")
    return digest.hexdigest()[:12]


@cache
def cache_folder() -> Path | None:
    """Where object code is kept: TINYLLM_HOME, the XDG cache, or a private temporary folder; None if nothing is
    writable.
    """
    home = os.environ.get("TINYLLM_HOME")
    base = os.environ.get("XDG_CACHE_HOME")
    candidates = []
    if home:
        candidates.append(Path(home))
    else:
        if base:
            candidates.append(Path(base) / "tinyllm")
        with contextlib.suppress(RuntimeError):
            candidates.append(Path.home() / ".cache" / "tinyllm")
    owner = os.getuid() if hasattr(os, "getuid") else "user"
    candidates.append(Path(tempfile.gettempdir()) / f"tinyllm-{owner}")
    for candidate in candidates:
        folder = candidate / "kernels" / _environment_key()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if os.access(folder, os.W_OK | os.X_OK) and _owned(folder):
                return folder
        except OSError:
            continue
    log.warning("no cache folder is writable: kernels are compiled anew in each process (set TINYLLM_HOME)")
    return None


def _owned(folder: Path) -> bool:
    """Object code is run, so it must not come from a folder that belongs to somebody else."""
    return not hasattr(os, "getuid") or folder.stat().st_uid == os.getuid()


def kernel_addresses(names: Iterable[str]) -> dict[str, int]:
    """Addresses of the kernels, compiled now if the cache does not have them.

    Raises:
        KernelError: the kernels cannot be compiled or loaded on this machine.
    """
    names = list(dict.fromkeys(names))
    folder = cache_folder()
    missing = [name for name in names if name not in _loaded]
    stored = {name: content for name in missing if folder and (content := _read(folder, name))}
    to_compile = [name for name in missing if name not in stored]
    if to_compile:
        log.info("compiling kernels (first run): %d", len(to_compile))
        started = time.perf_counter()
        stored |= _compile_all(to_compile, folder)
        _compiling.append(time.perf_counter() - started)
    if stored:
        _load(stored)
    return {name: _loaded[name] for name in names}


def _compile_all(names: list[str], folder: Path | None) -> dict[str, bytes]:
    """Compile kernels, every second one in a process of its own where the cache can hand the results over."""
    names = sorted(names, key=lambda name: (not name.startswith("attention"), "gemm" not in name, name))
    helper = None
    if folder and len(names) > 3 and (os.cpu_count() or 1) > 1:
        helper = _start_compiler(names[1::2])
    result = {}
    for name in names[0::2] + names[1::2] if helper is None else names[0::2]:
        result |= _compile_and_keep(name, folder)
    if helper is not None:
        helper.wait()
        for name in names[1::2]:
            # Whatever the other process could not do is done here, where its error can be shown.
            content = _read(folder, name)
            result |= {name: content} if content else _compile_and_keep(name, folder)
    return result


def _compile_and_keep(name: str, folder: Path | None) -> dict[str, bytes]:
    content = compile_kernel(name)
    if content is None:
        return {}
    if folder:
        _write(folder, name, content)
    return {name: content}


def _start_compiler(names: list[str]) -> subprocess.Popen | None:
    command = [sys.executable, "-P", "-m", "tinyllm.kernels.jit", *names]
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except OSError:
        return None


def compile_seconds() -> float:
    """How long this process has waited for kernels to be compiled so far."""
    return sum(_compiling)


def compile_kernel(name: str) -> bytes | None:
    """Compile one kernel: a line with its symbol, then its object file. None if it was loaded by Numba itself."""
    try:
        from numba import cfunc, types
    except ImportError as error:
        raise KernelError(f"numba cannot be imported ({error}); reinstall tinyllm") from error
    module_name, _, rest = name.partition(".")
    builder, _, parameter = rest.partition(":")
    module = importlib.import_module(f"{__package__}.{module_name}")
    build = module.KERNELS[builder]
    function = build(parameter) if parameter else build()
    # Symbols are made of this name: kernels that different processes compiled are linked together later.
    function.__name__ = function.__qualname__ = re.sub(r"\W", "_", name)
    i64 = types.int64
    n_arguments = function.__code__.co_argcount
    result = i64 if getattr(function, "returns_int", False) else types.void
    # Inlined into its wrapper, the kernel provably raises nothing, and every trace of Python disappears.
    kernel = cfunc(result(*[i64] * n_arguments), nopython=True, error_model="numpy", forceinline=True)(function)
    try:
        # Not a public interface of Numba; where it is missing the kernel is used in place and not kept.
        content = kernel._library._get_compiled_object()
        symbol = kernel._wrapper_name
    except AttributeError:
        _loaded[name] = kernel.address
        _kept.append(kernel)
        return None
    if b"\0numba_" in content or b"\0Py" in content:
        raise KernelError(f"kernel {name} calls into Python: something in it can raise or allocate")
    return symbol.encode() + b"\n" + content


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name.replace(':', '-')}-{_source_key(name.partition('.')[0])}.kernel"


def _read(folder: Path, name: str) -> bytes | None:
    try:
        content = _path(folder, name).read_bytes()
    except OSError:
        return None
    size, _, rest = content.partition(b"\n")
    # A file that was cut off (full disk, copied folder) must not be run.
    return rest if size.isdigit() and len(rest) == int(size) else None


def _write(folder: Path, name: str, content: bytes) -> None:
    try:
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(b"%d\n" % len(content) + content)
        os.replace(file.name, _path(folder, name))
    except OSError as error:
        log.warning("cannot keep compiled kernels in %s: %s", folder, error)


@cache
def _provide_library_functions() -> None:
    """Tell the loader where the few C functions are that kernels call."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    if sys.platform == "win32":
        kernel32, runtime = ctypes.WinDLL("kernel32"), ctypes.CDLL("msvcrt")
        functions = {"sched_yield": kernel32.SwitchToThread, "usleep": kernel32.SwitchToThread}
    else:
        runtime = ctypes.CDLL(None)
        functions = {"sched_yield": runtime.sched_yield, "usleep": runtime.usleep}
    functions |= {name: getattr(runtime, name) for name in ("memcpy", "memset", "memmove")}
    for name, function in functions.items():
        llvm.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)


def _load(objects: dict[str, bytes]) -> None:
    _provide_library_functions()
    try:
        machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        for content in objects.values():
            engine.add_object_file(llvm.ObjectFileRef.from_data(content.partition(b"\n")[2]))
        engine.finalize_object()
    except RuntimeError as error:
        raise KernelError(f"compiled kernels cannot be loaded: {error}") from error
    _engines.append(engine)
    for name, content in objects.items():
        address = engine.get_function_address(content.partition(b"\n")[0].decode())
        if not address:
            raise KernelError(f"kernel {name} has no code; delete {cache_folder()} and try again")
        _loaded[name] = address


def main(names: list[str]) -> None:
    """Compile kernels into the cache: what a helper process of `_compile_all` does."""
    folder = cache_folder()
    for name in names:
        if folder and not _read(folder, name):
            _compile_and_keep(name, folder)


if __name__ == "__main__":
    main(sys.argv[1:])
