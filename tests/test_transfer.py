from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tinyllm.errors import DownloadError
from tinyllm.store import transfer

DATA = bytes(range(256)) * 20
SHA256 = hashlib.sha256(DATA).hexdigest()


class BrokenLine(Exception):
    pass


class Server:
    """Sends `data` in pieces of 100 bytes; `pieces` says after how many the line breaks, connection by connection."""

    def __init__(self, data: bytes = DATA, pieces: Iterable[int] = (), takes_offsets: bool = True):
        self.data, self.pieces, self.takes_offsets = data, iter(pieces), takes_offsets
        self.offsets: list[int] = []

    @contextmanager
    def open_from(self, offset: int) -> Iterator[tuple[bool, Iterable[bytes]]]:
        self.offsets.append(offset)
        start = offset if self.takes_offsets else 0
        yield self.takes_offsets and offset > 0, self._send(start, next(self.pieces, len(self.data)))

    def _send(self, start: int, n_pieces: int) -> Iterator[bytes]:
        for number, at in enumerate(range(start, len(self.data), 100)):
            if number == n_pieces:
                raise BrokenLine
            yield self.data[at : at + 100]


@pytest.fixture
def fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., bytes]:
    monkeypatch.setattr(transfer.time, "sleep", lambda seconds: None)

    def run(server: Server, sha256: str | None = SHA256, size: int = len(DATA), report=lambda done: None) -> bytes:
        target = tmp_path / "m.gguf"
        transfer.download(server.open_from, target, size, sha256, report, lambda done: None)
        assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]
        return target.read_bytes()

    return run


def test_all_at_once(fetch) -> None:
    server, reports = Server(), []
    assert fetch(server, report=reports.append) == DATA
    assert server.offsets == [0]
    assert reports[0] == 100 and reports[-1] == len(DATA)


def test_a_breaking_line(fetch) -> None:
    server = Server(pieces=[3, 0, 5, 0, 0, 7])
    assert fetch(server) == DATA
    assert server.offsets == [0, 300, 300, 800, 800, 800, 1500]


def test_a_server_that_ignores_offsets(fetch) -> None:
    server = Server(pieces=[3, 20], takes_offsets=False)
    assert fetch(server) == DATA
    assert server.offsets == [0, 300, 2000]


def test_a_dead_line_is_given_up(fetch, tmp_path: Path) -> None:
    server = Server(pieces=[2, *[0] * 99])
    with pytest.raises(BrokenLine):
        fetch(server)
    assert server.offsets == [0, *[200] * transfer.ATTEMPTS]
    assert not (tmp_path / "m.gguf").exists()
    server = Server()
    assert fetch(server) == DATA  # a later call goes on
    assert server.offsets == [200]


def test_other_contents_are_not_mixed(fetch, tmp_path: Path) -> None:
    with pytest.raises(BrokenLine):
        fetch(Server(pieces=[2, *[0] * 99]))
    other = DATA[::-1]
    server = Server(other)
    target = tmp_path / "m.gguf"
    transfer.download(server.open_from, target, len(other), hashlib.sha256(other).hexdigest(), *[lambda done: None] * 2)
    assert server.offsets == [0] and target.read_bytes() == other


@pytest.mark.parametrize("data", [DATA + b"more", DATA[:-1] + b"X"], ids=["too-long", "changed"])
def test_wrong_bytes_are_not_kept(fetch, tmp_path: Path, data: bytes) -> None:
    with pytest.raises(DownloadError, match=r"m\.gguf arrived with another size or SHA-256"):
        fetch(Server(data))
    assert list(tmp_path.iterdir()) == []


def test_without_a_sum_the_size_counts(fetch) -> None:
    assert fetch(Server(DATA[:-1] + b"X"), sha256=None) == DATA[:-1] + b"X"
    with pytest.raises(DownloadError):
        fetch(Server(DATA + b"more"), sha256=None)
