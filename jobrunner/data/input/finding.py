"""Find the files that `input.path` means and give each its name. Reads no file."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

from jobrunner.data.input.files import (
    File,
    LocalFile,
    RemoteFile,
    is_remote,
    local_path,
    open_store,
    reading,
)
from jobrunner.errors import ConfigError

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
# how Hive, Spark and others spell null in the name of a folder
_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True, slots=True)
class Found:
    """A file and its name: its path below the input's root, with forward slashes.

    `partition` are the columns in the names of its folders, as in `year=2024`, and `integers`
    those of them that are integers in all files.
    """

    name: str
    file: File
    partition: Mapping[str, str | int | None] = field(default_factory=dict)
    integers: frozenset[str] = frozenset()


def find_files(path: str, base: Path, suffixes: Collection[str]) -> list[Found]:
    """Find the files that `path` means: a file, a folder or a glob below `base`, or a URL.

    A folder is searched to any depth for names that end in one of `suffixes`; names that begin
    with a dot or an underscore are skipped. The list is sorted by name. Raises ConfigError where
    nothing is found, InfrastructureError where a folder or a store cannot be read.
    """
    if is_remote(path):
        try:
            root, files = _remote(path, suffixes)
        except ValueError as error:
            # what a store says of a URL without a bucket
            raise ConfigError(
                f"input path `{path}` cannot be read: {error}", hint="name the bucket and a path"
            ) from error
    else:
        root, files = _local(path, base, suffixes)
    if not files:
        endings = ", ".join(f"`*{suffix}`" for suffix in suffixes)
        raise ConfigError(
            f"input path `{path}` has no file to read (looked in `{root}`)",
            hint=f"a folder is searched for {endings}; for other names use a glob",
        )
    for name, file in files.items():
        _check_name(name, file)
    return _partitioned(dict(sorted(files.items())))


def _local(path: str, base: Path, suffixes: Collection[str]) -> tuple[str, dict[str, File]]:
    pattern = Path(local_path(path))
    target = base / pattern
    with reading(target):
        if target.is_dir():
            root, paths = target, _files_below(target, suffixes)
        elif target.exists():
            root, paths = target.parent, [target]
        elif glob.has_magic(str(pattern)):
            root, paths = _files_of_glob(pattern, base)
        else:
            raise _missing(path, str(target))
    return str(root), {file.relative_to(root).as_posix(): LocalFile(file) for file in paths}


def _files_below(folder: Path, suffixes: Collection[str]) -> list[Path]:
    def fail(error: OSError) -> None:
        # os.walk would leave the folder out without a word
        raise error

    files: list[Path] = []
    seen: set[str] = set()
    for here, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        # a link may lead back to a folder above it
        real = os.path.realpath(here)
        folders[:] = [] if real in seen else [name for name in folders if not _hidden(name)]
        if real not in seen:
            files += [Path(here, name) for name in names if _is_shard(name, suffixes)]
        seen.add(real)
    return files


def _files_of_glob(pattern: Path, base: Path) -> tuple[Path, list[Path]]:
    fixed, wild = _split_glob(pattern.parts)
    if ".." in wild:
        raise ConfigError(
            f"input path `{pattern}` has `..` after a wildcard",
            hint="a shard is named by its path below a folder: put `..` in front",
        )
    root = base.joinpath(*fixed)
    # a set: several `**` find a file several times
    names = set(glob.glob(str(Path(*wild)), root_dir=root, recursive=True))
    return root, [root / name for name in _visible(names, wild) if (root / name).is_file()]


def _remote(url: str, suffixes: Collection[str]) -> tuple[str, dict[str, File]]:
    store, path = open_store(url)
    with reading(url):
        kind = _kind(store, path)
        if kind == "directory":
            root = path
            below = (_below(name, root) for name in store.find(path))
            names = [name for name in below if _is_visible_shard(name, suffixes)]
        elif kind == "file":
            root = path.rpartition("/")[0]
            names = [_below(path, root)]
        elif glob.has_magic(path):
            fixed, wild = _split_glob(path.split("/"))
            root = "/".join(fixed)
            told = store.glob(path, detail=True)
            names = [_below(name, root) for name in told if told[name]["type"] == "file"]
            names = _visible(names, wild)
        else:
            raise _missing(url, url)
    return store.unstrip_protocol(root), {
        name: RemoteFile(store, f"{root}/{name}") for name in names
    }


def _kind(store: Any, path: str) -> str | None:
    try:
        kind: str = store.info(path)["type"]
    except FileNotFoundError:
        return None
    return kind


def _below(path: str, root: str) -> str:
    return path.removeprefix(root).removeprefix("/")


def _split_glob(parts: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    fixed = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    return parts[:fixed], parts[fixed:]


def _visible(names: Collection[str], wild: Sequence[str]) -> list[str]:
    """Leave hidden names out of what a glob found, unless it asks for them."""
    if any(_hidden(part) for part in wild):
        return list(names)
    return [name for name in names if not any(map(_hidden, name.split("/")))]


def _is_visible_shard(name: str, suffixes: Collection[str]) -> bool:
    *folders, last = name.split("/")
    return _is_shard(last, suffixes) and not any(map(_hidden, folders))


def _is_shard(name: str, suffixes: Collection[str]) -> bool:
    return name.lower().endswith(tuple(suffixes)) and not _hidden(name)


def _hidden(name: str) -> bool:
    return name.startswith((".", "_"))


def _missing(path: str, target: str) -> ConfigError:
    return ConfigError(
        f"input path `{path}` does not exist (looked for `{target}`)",
        hint="name a file, a folder or a glob, relative to the job file, or a URL like s3://",
    )


def _check_name(name: str, file: File) -> None:
    """Refuse names that no result file can have."""
    if any("\ud800" <= character <= "\udfff" for character in name):
        raise ConfigError(f"the name of `{file}` is not UTF-8", hint="rename the file")
    # an object store takes any name
    if "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise ConfigError(
            f"the name of `{file}` cannot be that of a result file", hint="rename the file"
        )


def _partitioned(files: Mapping[str, File]) -> list[Found]:
    """Read the columns in the names of folders; one whose values are all integers is int64."""
    texts = {name: _partition_of(name) for name in files}
    values: dict[str, set[str]] = {}
    for partition in texts.values():
        for column, text in partition.items():
            values.setdefault(column, set()).add(text)
    integers = frozenset(
        column
        for column, found in values.items()
        if found != {_NULL} and all(map(_INTEGER.fullmatch, found - {_NULL}))
    )
    return [
        Found(name, file, _valued(texts[name], integers), integers & texts[name].keys())
        for name, file in files.items()
    ]


def _valued(partition: Mapping[str, str], integers: Collection[str]) -> dict[str, str | int | None]:
    return {
        column: None if text == _NULL else int(text) if column in integers else text
        for column, text in partition.items()
    }


def _partition_of(name: str) -> dict[str, str]:
    folders = (part.partition("=") for part in PurePosixPath(name).parts[:-1])
    return {unquote(column): unquote(text) for column, equals, text in folders if equals and column}
