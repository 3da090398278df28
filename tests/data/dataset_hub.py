"""A stand-in, on loopback, for what `datasets` asks of the hub."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote

from tests.loopback import serving

COMMIT = "c0ffee" + "0" * 34
CREATED = "2024-01-01T00:00:00.000Z"


class DatasetHub(BaseHTTPRequestHandler):
    """Answers for the datasets in `repositories`: file names and contents by hub id."""

    repositories: Mapping[str, Mapping[str, bytes]]

    def do_GET(self) -> None:
        self.answer()

    def do_HEAD(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(self.path.split("?")[0]).lstrip("/")
        for name, files in self.repositories.items():
            if path.startswith(f"datasets/{name}/resolve/"):
                self.file(files, path.removeprefix(f"datasets/{name}/resolve/").split("/", 1)[1])
                return
            asked = re.fullmatch(rf"api/datasets/{name}(?:/(\w[\w-]*)/[^/]+(?:/(.*))?)?", path)
            if asked:
                self.api(name, files, asked[1] or "revision", asked[2] or "", body)
                return
        self.refuse("RepoNotFound")

    def api(
        self, name: str, files: Mapping[str, bytes], what: str, folder: str, body: bytes
    ) -> None:
        if what == "tree":
            self.json(tree(files, folder, recursive="recursive=True" in self.path))
        elif what == "paths-info":
            wanted = asked_paths(body, self.headers.get("Content-Type") or "")
            self.json([one for one in tree(files, "", recursive=True) if one["path"] in wanted])
        else:
            siblings = [{"rfilename": file} for file in files]
            times = {"createdAt": CREATED, "lastModified": CREATED}
            self.json({"id": name, "sha": COMMIT, "siblings": siblings, "tags": [], **times})

    def file(self, files: Mapping[str, bytes], file: str) -> None:
        if file not in files:
            self.refuse("EntryNotFound")
            return
        content = files[file]
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if wanted:
            start, stop = int(wanted[1]), int(wanted[2] or len(content) - 1) + 1
            piece = content[start:stop]
            span = f"bytes {start}-{start + len(piece) - 1}/{len(content)}"
            self.reply(206, piece, tag(content), {"Content-Range": span})
        else:
            self.reply(200, content, tag(content), {"Accept-Ranges": "bytes"})

    def json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.reply(200, body, tag(body), {"Content-Type": "application/json"})

    def refuse(self, code: str) -> None:
        self.reply(404, b"{}", "none", {"X-Error-Code": code})

    def reply(self, status: int, body: bytes, etag: str, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        sent = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Content-Length": str(len(body))}
        for name, value in {**sent, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def tag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def tree(files: Mapping[str, bytes], folder: str, *, recursive: bool) -> list[dict[str, Any]]:
    """The entries below a folder, its own folders too."""
    top = f"{folder}/" if folder else ""
    below = {path: content for path, content in files.items() if path.startswith(top)}
    folders = {
        "/".join(path.split("/")[:depth])
        for path in below
        for depth in range(1 + top.count("/"), path.count("/") + 1)
    }
    entries = [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in folders]
    entries += [
        {"type": "file", "path": path, "size": len(content), "oid": tag(content)}
        for path, content in below.items()
    ]
    return [e for e in entries if recursive or "/" not in str(e["path"]).removeprefix(top)]


def asked_paths(body: bytes, kind: str) -> list[str]:
    if "json" in kind:
        paths: list[str] = json.loads(body)["paths"]
        return paths
    return parse_qs(body.decode()).get("paths", [])


@contextmanager
def dataset_hub(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[str]:
    """Serve these datasets; yield the endpoint."""
    handler = type("Hub", (DatasetHub,), {"repositories": repositories})
    with serving(handler) as endpoint:
        yield endpoint
