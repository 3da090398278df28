"""Open files where they lie: on a disk or in an object store. Knows nothing of formats."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import pyarrow as pa

from jobrunner.errors import ConfigError, InfrastructureError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(://|::)")
_EXTRAS = {"s3": "s3", "s3a": "s3"}
# a cache of single blocks: columns far apart in a row group are read in turns
_REMOTE_OPTIONS = {
    "block_size": 2**20,
    "cache_type": "blockcache",
    "cache_options": {"maxblocks": 32},
}
# what the clients of object stores raise that is no OSError, by the module that defines it
_STORE_FAULTS = (
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("aiohttp", "ClientError"),
    ("gcsfs.retry", "HttpError"),
    ("google.auth.exceptions", "GoogleAuthError"),
    ("azure.core.exceptions", "AzureError"),
)
# what an object store tells of an object that changes whenever its content does
_VERSIONS = ("ETag", "etag", "md5Hash", "LastModified", "last_modified", "updated", "created")


class Stamp(NamedTuple):
    """A cheap sign that a file is as it was: its size in bytes and its time or version."""

    size: int
    version: str


class File(Protocol):
    """One file, wherever it lies; `str()` names it to a person."""

    def open(self) -> BinaryIO:
        """Open for reading from the start, unbuffered."""

    def stamp(self) -> Stamp:
        """Look at the file without reading it."""

    def parquet_source(self) -> Any:
        """What pyarrow's Parquet reader takes: a path, or an open file."""


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file on a disk."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def open(self) -> BinaryIO:
        return self.path.open("rb", buffering=0)

    def stamp(self) -> Stamp:
        status = self.path.stat()
        return Stamp(status.st_size, str(status.st_mtime_ns))

    def parquet_source(self) -> Path:
        return self.path


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """An object in a store that fsspec reaches."""

    store: Any
    path: str

    def __str__(self) -> str:
        return str(self.store.unstrip_protocol(self.path))

    def open(self) -> BinaryIO:
        file: BinaryIO = self.store.open(self.path, "rb", **_REMOTE_OPTIONS)
        return file

    def stamp(self) -> Stamp:
        self.store.invalidate_cache()
        told = self.store.info(self.path)
        version = next((str(told[key]) for key in _VERSIONS if told.get(key)), "")
        return Stamp(int(told["size"]), version)

    def parquet_source(self) -> BinaryIO:
        return self.open()


def is_remote(path: str) -> bool:
    """Tell a URL of an object store from a path; `file://` is a path."""
    return _URL.match(path) is not None and not path.startswith(("file://", "local://"))


def local_path(path: str) -> str:
    """A path without `file://`, its `~` resolved."""
    return os.path.expanduser(path.removeprefix("file://").removeprefix("local://"))


def open_store(url: str) -> tuple[Any, str]:
    """The store that a URL means, as fsspec's own configuration opens it, and the path in it.

    Raises ConfigError where there is no such kind of store or its package is not installed.
    """
    from fsspec.core import url_to_fs

    scheme = re.split("://|::", url, maxsplit=1)[0]
    try:
        with reading(url):
            store, path = url_to_fs(url)
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        install = f"pip install 'jobrunner[{extra}]'" if extra else "install the package it names"
        raise ConfigError(f"cannot open `{url}`: {error}", hint=install) from error
    except ValueError as error:
        raise ConfigError(
            f"cannot open `{url}`: {error}",
            hint="use a scheme that fsspec knows, like s3://, or a path",
        ) from error
    # what this process listed before may be out of date
    store.invalidate_cache()
    return store, str(path)


@contextmanager
def reading(file: object) -> Iterator[None]:
    """Turn what goes wrong while a file is read into an InfrastructureError that names it."""
    try:
        yield
    except _faults() as error:
        raise unreadable(file, error) from error


def unreadable(file: object, why: object) -> InfrastructureError:
    """The error of a file that cannot be read."""
    return InfrastructureError(
        f"cannot read `{file}`: {str(why) or type(why).__name__}",
        hint="check the file and its disk, then run the same command again",
    )


def changed_meanwhile(file: object) -> InfrastructureError:
    """The error of a file that was not the same from the first to the last look at it."""
    return InfrastructureError(
        f"`{file}` changed while it was looked at",
        hint="run the same command again once nobody writes to it",
    )


def _faults() -> tuple[type[BaseException], ...]:
    """What reading raises; a client that was never imported has raised nothing."""
    clients = (
        getattr(sys.modules[module], name)
        for module, name in _STORE_FAULTS
        if module in sys.modules
    )
    return (OSError, EOFError, pa.ArrowException, *clients)
