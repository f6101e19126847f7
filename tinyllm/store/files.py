"""Where models live on this machine: the store's folders, what is in them, and locks between processes.

The store is `$TINYLLM_HOME`, else `$XDG_CACHE_HOME/tinyllm`, else `~/.cache/tinyllm`. Models are in its
folder `models`: catalogue models as plain files, those of the Hugging Face hub under `hub/<user>/<repo>`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tinyllm.errors import DownloadError

log = logging.getLogger("tinyllm")

CHUNK = 1 << 20
SHARD = re.compile(r"-(\d{5})-of-(\d{5})$")


@dataclass(frozen=True)
class Progress:
    """One report of a running download.

    `name` is the model, `done` and `total` are bytes (`total` 0: not known yet), `note` says what is going on when it
    is not the download itself ("checking", "waiting for another download of this model").
    """

    name: str
    done: int
    total: int
    note: str = ""


ProgressCallback = Callable[[Progress], None]
"""Called with each report, possibly from another thread and several times a second."""


def ignore_progress(progress: Progress) -> None:
    """The callback of those who do not look."""


def home() -> Path:
    """The folder in which everything that tinyllm keeps is looked for. It need not exist."""
    return _places()[0]


def models_folders() -> list[Path]:
    """The folders in which local models are looked for, the first one first; they need not exist."""
    return [place / "models" for place in _places()]


def writable_home() -> Path:
    """The store's folder, created when it is missing.

    Where the user's cache folder cannot be written, one in the temporary directory is used, with a warning in the log.

    Raises:
        DownloadError: nothing can be written, or the folder that `TINYLLM_HOME` names cannot.
    """
    places = _places()
    for place in places:
        if _make_writable(place, private=place is not places[0]):
            if place is not places[0]:
                _warn_of_fallback(places[0], place)
            return place
    raise DownloadError(f"{places[0]}: cannot be written; set TINYLLM_HOME to a folder that can")


@cache
def _warn_of_fallback(wanted: Path, used: Path) -> None:
    """Once per process: the store is asked for several times in a download."""
    log.warning("%s cannot be written; models are kept in %s (set TINYLLM_HOME to choose)", wanted, used)


def _places() -> list[Path]:
    """The chosen folder, and behind it the fallback in the temporary directory unless the user chose."""
    if chosen := os.environ.get("TINYLLM_HOME"):
        return [Path(chosen).expanduser().absolute()]
    fallback = Path(tempfile.gettempdir()) / f"tinyllm-{os.getuid() if hasattr(os, 'getuid') else 'user'}"
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return [Path(cache).expanduser().absolute() / "tinyllm", fallback]
    try:
        return [Path.home() / ".cache" / "tinyllm", fallback]
    except RuntimeError:  # no HOME, and the user is not in the password database
        return [fallback]


def _make_writable(folder: Path, private: bool) -> bool:
    """Create `folder` if need be. A private one (in a directory that everybody writes to) must belong to this user."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700 if private else 0o777)
        if private and hasattr(os, "getuid") and folder.lstat().st_uid != os.getuid():
            return False
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


@contextmanager
def locked(name: str, report: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of one model, so that two processes never write the same file; says through `report` that it waits.

    The operating system lets go of the lock when a process dies.
    """
    from filelock import FileLock, Timeout

    folder = writable_home() / "locks"
    folder.mkdir(exist_ok=True)
    lock = FileLock(folder / (re.sub(r"[^\w.-]+", "+", name.casefold()) + ".lock"))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        report("waiting for another download of this model")
        lock.acquire(poll_interval=0.2)
    try:
        yield
    finally:
        lock.release()


def check_space(folder: Path, needed: int, name: str) -> None:
    """Refuse early what the disk cannot hold.

    Raises:
        DownloadError: fewer than `needed` bytes are free where `folder` is.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DownloadError(f"{name} needs {needed / 1e6:.0f} MB in {folder}, where {free / 1e6:.0f} MB are free")


def sha256_of(path: Path, report: Callable[[int], None]) -> str:
    """SHA-256 of a file in hex; `report` gets the number of bytes read so far."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(CHUNK):
            digest.update(block)
            report(file.tell())
    return digest.hexdigest()


@dataclass(frozen=True)
class ModelFiles:
    """One model on disk: its first file (what is opened) and all its shards in order."""

    first: Path
    files: tuple[Path, ...]

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(file.stat().st_size for file in self.files)

    @property
    def modified(self) -> float:
        """Seconds since the epoch at which the newest file was written."""
        return max(file.stat().st_mtime for file in self.files)


def models_in(folder: Path) -> list[ModelFiles]:
    """All complete models below `folder`, sorted by path; of a sharded model every shard must be there."""
    sets: dict[Path, list[Path]] = {}
    for path in sorted(folder.rglob("*.gguf")):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            sets.setdefault(path.with_name(unsharded(path.name)), []).append(path)
    return [ModelFiles(files[0], tuple(files)) for files in sets.values() if len(files) == n_shards(files[0].name)]


def unsharded(filename: str) -> str:
    """The name of a GGUF file without `-00001-of-00003`."""
    stem, dot, ending = filename.rpartition(".")
    return SHARD.sub("", stem) + dot + ending


def n_shards(filename: str) -> int:
    """How many files the model has to which a file of this name belongs."""
    match = SHARD.search(filename.rpartition(".")[0])
    return int(match[2]) if match else 1
