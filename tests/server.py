"""A web server on loopback that serves a folder of repositories as the Hugging Face hub does, and other files as such.

`root/owner/name/FILE` is FILE of the repository owner/name at revision "main", `root/owner/name@REVISION/FILE` that at
another revision. Every request is logged, and faults can be set by path.
"""

import hashlib
import json
import math
import re
import threading
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import huggingface_hub
import pytest
from huggingface_hub import constants

from eqzoo.checkpoint import hub


@dataclass
class Fault:
    """What goes wrong with the next `times` GETs of a path; an error status or a redirect meets its HEADs too."""

    status: int | None = None
    redirect: str | None = None
    cut_after: int | None = None  # bytes of the body before the connection ends
    wrong_bytes: bool = False
    ignores_range: bool = False
    wrong_range: bool = False  # answers with other bytes than were asked for
    pause: float = 0.0  # seconds before each of the body's chunks
    times: float = math.inf


class Request(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]


@dataclass
class Server:
    """`with Server(folder) as server:` serves until the block ends."""

    root: Path
    token: str = "hf_right"
    private: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    faults: dict[str, Fault] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> "Server":
        handler = type("BoundHandler", (_Handler,), {"site": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def paths(self, method: str) -> list[str]:
        """The paths asked for with this method, in order; without what huggingface_hub asks for itself."""
        with self.lock:
            return [r.path for r in self.requests if r.method == method and r.path != "/api/agent-harnesses"]

    def commit(self, repository: str, revision: str = "main") -> str:
        """The name of a revision's present content; equal content has one name."""
        folder = self.folder(repository, revision)
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        names = [f"{repository}/{file.relative_to(folder).as_posix()}".encode() for file in files]
        return hashlib.sha1(
            b"".join(name + file.read_bytes() for name, file in zip(names, files, strict=True))
        ).hexdigest()

    def folder(self, repository: str, revision: str) -> Path:
        return self.root / (repository if revision == "main" else f"{repository}@{revision}")

    def folder_of(self, repository: str, revision_or_commit: str) -> tuple[Path, str] | None:
        """The folder and commit of a revision given by name or by commit."""
        owner, _, name = repository.partition("/")
        for folder in (self.root / owner).glob(f"{name}*"):
            named, _, revision = folder.name.partition("@")
            commit = self.commit(repository, revision or "main")
            if named == name and revision_or_commit in (revision or "main", commit):
                return folder, commit
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    site: Server

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self._path = urllib.parse.unquote(self.path.partition("?")[0])
        fault = Fault()
        headers = {name.lower(): value for name, value in self.headers.items()}
        with self.site.lock:
            self.site.requests.append(Request(self.command, self._path, headers))
            planned = self.site.faults.get(self._path)
            if planned and planned.times > 0 and (self.command == "GET" or planned.status or planned.redirect):
                planned.times -= 1
                fault = planned
        if fault.status is not None:
            self._send(fault.status, {})
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self._path):
            self._send_of_repository(fault, *match.groups())
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", self._path):
            self._send_tree(*match.groups())
        elif (file := self.site.root / self._path.lstrip("/")).is_file():
            self._send_file(fault, file, {})
        else:
            self._send(404, {})

    def _refused(self, repository: str) -> bool:
        authorised = self.headers.get("Authorization") == f"Bearer {self.site.token}"
        if repository in self.site.gated and not authorised:
            self._send(403, {"X-Error-Code": "GatedRepo"})
        elif not self.site.folder(repository, "main").is_dir() or (repository in self.site.private and not authorised):
            self._send(401, {"X-Error-Code": "RepoNotFound"})
        else:
            return False
        return True

    def _send_of_repository(self, fault: Fault, repository: str, revision: str, name: str) -> None:
        if self._refused(repository):
            return
        found = self.site.folder_of(repository, revision)
        if found is None:
            self._send(404, {"X-Error-Code": "RevisionNotFound"})
            return
        folder, commit = found
        file = folder / name
        if not file.is_file():
            self._send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        etag = f'"{hashlib.sha256(file.read_bytes()).hexdigest()}"'
        size = str(file.stat().st_size)
        linked = {"X-Repo-Commit": commit, "X-Linked-Etag": etag, "X-Linked-Size": size}
        self._send_file(fault, file, {"ETag": etag, **linked})

    def _send_tree(self, repository: str, revision: str) -> None:
        if self._refused(repository):
            return
        found = self.site.folder_of(repository, revision)
        if found is None:
            self._send(404, {"X-Error-Code": "RevisionNotFound"})
            return
        files = sorted(found[0].iterdir())
        tree = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": "0" * 40} for f in files]
        self._send(200, {"Content-Type": "application/json"}, json.dumps(tree).encode())

    def _send_file(self, fault: Fault, file: Path, headers: dict[str, str]) -> None:
        if fault.redirect is not None:
            self._send(302, {**headers, "Location": fault.redirect})
            return
        body = file.read_bytes()
        if fault.wrong_bytes:
            body = bytes(byte ^ 1 for byte in body)
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if asked is None or fault.ignores_range:
            self._send(200, headers, body, fault)
            return
        start = 0 if fault.wrong_range else int(asked[1])
        if start >= len(body):
            self._send(416, {**headers, "Content-Range": f"bytes */{len(body)}"})
        else:
            content_range = f"bytes {start}-{len(body) - 1}/{len(body)}"
            self._send(206, {**headers, "Content-Range": content_range}, body[start:], fault)

    def _send(self, status: int, headers: dict[str, str], body: bytes = b"", fault: Fault | None = None) -> None:
        fault = fault or Fault()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        whole = len(body)
        body = body[: fault.cut_after]
        self.close_connection = len(body) < whole
        step = 4096 if fault.pause else max(len(body), 1)
        try:
            for begin in range(0, len(body), step):
                time.sleep(fault.pause)
                self.wfile.write(body[begin : begin + step])
        except OSError:  # the client has gone
            self.close_connection = True


@contextmanager
def serving_as_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server of `folder / "site"` that huggingface_hub takes for its hub, an empty cache in `folder / "home"`, and no
    waiting."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hub, "WAITS", (0.0, 0.0, 0.0, 0.0))
    with Server(folder / "site") as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "home" / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "home" / "token"))
        monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(folder / "home" / "assets"))
        yield server
        huggingface_hub.close_session()
