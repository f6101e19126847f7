"""A Hugging Face hub of a few files in memory, for tests: point HF_ENDPOINT at `FakeHub.url`."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Serves `files` ({repo: {filename: bytes}}) the way the hub does.

    Attributes:
        ignore_range: answer 200 with the whole file to a request for a part of it.
        gated, failing: repositories that answer 403 or 500.
        seconds_per_chunk: how slow 64 KB are.
        lies: announce another SHA-256 than the files have.
        requests: (method, path, Range header) of every request so far.
    """

    def __init__(self, files: dict[str, dict[str, bytes]]):
        self.files = files
        self.ignore_range = False
        self.gated: set[str] = set()
        self.failing: set[str] = set()
        self.seconds_per_chunk = 0.0
        self.lies = False
        self.requests: list[tuple[str, str, str | None]] = []
        self.tokens: set[str] = set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FakeHub:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(hub) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self.answer()

            def do_GET(self) -> None:
                self.answer()

            def answer(self) -> None:
                path = unquote(urlsplit(self.path).path)
                hub.requests.append((self.command, path, self.headers.get("Range")))
                if token := self.headers.get("Authorization"):
                    hub.tokens.add(token)
                if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/[^/]+)?", path):
                    self.describe(match[1])
                elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
                    self.send_file(match[1], match[2])
                else:
                    self.refuse(404, "EntryNotFound")

            def describe(self, repo: str) -> None:
                actual = next((name for name in hub.files if name.lower() == repo.lower()), None)
                if actual in hub.failing:
                    return self.refuse(500, "")
                if actual in hub.gated:
                    return self.refuse(403, "GatedRepo")
                if actual is None:
                    return self.refuse(401, "RepoNotFound")
                siblings = [
                    {
                        "rfilename": name,
                        "size": len(data),
                        "lfs": {"sha256": hub.sha256(data), "size": len(data), "pointerSize": 1},
                    }
                    for name, data in hub.files[actual].items()
                ]
                body = json.dumps({"_id": "1", "id": actual, "sha": COMMIT, "siblings": siblings}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def send_file(self, repo: str, name: str) -> None:
                data = hub.files.get(repo, {}).get(name)
                if data is None:
                    return self.refuse(404, "EntryNotFound")
                start = 0
                asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
                if asked and not hub.ignore_range:
                    start = int(asked[1])
                    self.send_response(206)
                    self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
                else:
                    self.send_response(200)
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("ETag", f'"{hub.sha256(data)}"')
                self.send_header("Content-Length", str(len(data) - start))
                self.end_headers()
                if self.command == "HEAD":
                    return
                for at in range(start, len(data), 1 << 16):
                    self.wfile.write(data[at : at + (1 << 16)])
                    if hub.seconds_per_chunk:
                        self.wfile.flush()
                        time.sleep(hub.seconds_per_chunk)

            def refuse(self, status: int, code: str) -> None:
                self.send_response(status)
                if code:
                    self.send_header("X-Error-Code", code)
                    self.send_header("X-Error-Message", code)
                self.send_header("Content-Length", "0")
                self.end_headers()

        return Handler

    def sha256(self, data: bytes) -> str:
        return hashlib.sha256(data + (b"lie" if self.lies else b"")).hexdigest()
