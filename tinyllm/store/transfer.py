"""Downloads that can be continued: a way to read a remote file from an offset flows in, a checked file comes out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from tinyllm.errors import DownloadError
from tinyllm.store.files import sha256_of

ATTEMPTS = 5
"""How often in a row a broken connection may bring nothing before the download is given up."""

OpenFrom = Callable[[int], AbstractContextManager[tuple[bool, Iterable[bytes]]]]
"""Opens the remote file at an offset. Gives whether what follows is really the rest (a server may ignore the offset and
send the whole file), and the bytes. OSError means that trying again is of no use; any other exception is a bad line."""


def download(
    open_from: OpenFrom,
    target: Path,
    size: int,
    sha256: str | None,
    report: Callable[[int], None],
    checking: Callable[[int], None],
) -> None:
    """Fetch a file of known size. The caller holds the lock of the model.

    The bytes gather in `<target>.<start of the SHA-256>.part`, which later calls continue, and get their name when size
    and SHA-256 are right. `report` gets the number of bytes that are there, `checking` then how many are checked.

    Raises:
        DownloadError: what arrived is not what was announced; it is not kept.
        OSError: the disk, or what `open_from` raised.
        Exception: what the line broke off with the last time.
    """
    partial = target.with_name(f"{target.name}.{(sha256 or 'unchecked')[:8]}.part")
    partial.touch()
    useless = 0
    while (have := partial.stat().st_size) < size:
        try:
            _append(partial, have, size, open_from, report)
        except OSError:
            raise
        except Exception:
            useless = useless + 1 if partial.stat().st_size <= have else 0
            if useless == ATTEMPTS:
                raise
            time.sleep(useless)
    if have != size or (sha256 and sha256_of(partial, checking) != sha256):
        partial.unlink()
        raise DownloadError(f"{target.name} arrived with another size or SHA-256 than was announced; try again")
    partial.replace(target)


def _append(partial: Path, have: int, size: int, open_from: OpenFrom, report: Callable[[int], None]) -> None:
    with open_from(have) as (is_rest, chunks), partial.open("ab" if is_rest else "wb") as out:
        for chunk in chunks:
            out.write(chunk)
            report(out.tell())
            if out.tell() > size:
                break
        out.flush()
        os.fsync(out.fileno())
