"""A server that speaks what huggingface_hub asks of the hub, for the repositories of a folder.

    FOLDER/org/name/REVISION/files...

Each revision is a branch with one commit.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

_INFO = re.compile(r"/api/models/([^/]+/[^/]+)/(?:revision|tree)/([^/?]+)")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


def commit_of(revision: str) -> str:
    return hashlib.sha1(revision.encode()).hexdigest()


@dataclass
class Hub:
    address: str
    asked: list[str] = field(default_factory=list)
    """Paths of all requests."""


@contextmanager
def serving_hub(folder: Path) -> Iterator[Hub]:
    hub = Hub("")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(whole=True)

        def do_HEAD(self) -> None:
            self._answer(whole=False)

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _answer(self, *, whole: bool) -> None:
            path = unquote(self.path.partition("?")[0])
            hub.asked.append(path)
            if found := _INFO.match(path):
                where = self._commit(found[1], found[2])
                if where is not None:
                    self._tell(found[1], where, is_tree="/tree/" in path)
            elif found := _FILE.match(path):
                where = self._commit(found[1], found[2])
                if where is not None:
                    content = (where / found[3]).read_bytes()
                    etag = hashlib.sha1(content).hexdigest()
                    named = {"ETag": f'"{etag}"', "X-Repo-Commit": commit_of(where.name)}
                    self._send(200, content, named, whole=whole)
            else:
                self._send(404, b"{}", {}, whole=whole)

        def _commit(self, repo: str, revision: str) -> Path | None:
            """The folder of a revision, given by its name or its commit."""
            if not (folder / repo).is_dir():
                self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
                return None
            for one in (folder / repo).iterdir():
                if revision in (one.name, commit_of(one.name)):
                    return one
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return None

        def _tell(self, repo: str, where: Path, *, is_tree: bool) -> None:
            files = [path for path in sorted(where.rglob("*")) if path.is_file()]
            if is_tree:
                told: object = [
                    {
                        "type": "file",
                        "path": str(path.relative_to(where)),
                        "size": path.stat().st_size,
                        "oid": hashlib.sha1(path.read_bytes()).hexdigest(),
                    }
                    for path in files
                ]
            else:
                named = [{"rfilename": str(path.relative_to(where))} for path in files]
                told = {"id": repo, "sha": commit_of(where.name), "siblings": named}
            self._send(200, json.dumps(told).encode(), {"Content-Type": "application/json"})

        def _send(
            self, status: int, content: bytes, headers: Mapping[str, str], *, whole: bool = True
        ) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if whole:
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
