"""Open `input.dataset`: a hub id, a folder, or what `save_to_disk` wrote, through `datasets`.

No code of a dataset is ever run. A dataset is one shard, read where `datasets` keeps it. One that
is streamed is first copied into the run directory, whole or not at all: exactly-once needs rows
that stand still and can be read again from the middle, and a stream promises neither.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobrunner.config import InputTable
from jobrunner.data.input.files import reading
from jobrunner.data.input.formats.content import (
    CARRIED_BATCH_ROWS,
    Place,
    Record,
    Wanted,
    batch_without_columns,
)
from jobrunner.data.input.formats.parquet import first_records
from jobrunner.data.input.shards import Shard, find_shards, limit_shards
from jobrunner.data.layout import make_folder, sync
from jobrunner.errors import ConfigError, InfrastructureError, JobError

log = logging.getLogger("cbjob")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
# a streamed dataset becomes files of so many rows, fetched so many at a time
_FILE_ROWS = 20_000
_FETCH_ROWS = 1_000


def find_dataset(
    table: InputTable, base: Path, cache: Path, wanted: Wanted, limit: int | None = None
) -> list[Shard]:
    """Open the dataset that the settings name; a folder is relative to `base`.

    A streamed one is copied below `cache`. Raises ConfigError where there is no such dataset or
    split, InfrastructureError where the hub or the disk fails.
    """
    name = table.dataset or ""
    folder = base / os.path.expanduser(name)
    if not folder.is_dir() and not _HUB_ID.fullmatch(name):
        raise _missing(name, folder)
    saved = any((folder / mark).is_file() for mark in ("state.json", "dataset_dict.json"))
    if table.streaming and not saved:
        copy = _copied(name, folder, table.split, cache, limit)
        return find_shards(str(copy), copy, "parquet", wanted, limit)
    with _asking(name, folder):
        dataset = _saved(table, folder) if saved else _loaded(name, folder, table.split)
        content = DatasetContent(dataset, wanted)
    shard = table.split.replace("/", "_")
    return limit_shards([Shard(shard, name, content, content.rows, content.schema)], limit)


class DatasetContent:
    """A dataset in the Arrow files of `datasets`: any row can be read at once."""

    format = "dataset"

    def __init__(self, dataset: Any, wanted: Wanted) -> None:
        self.rows: int = len(dataset)
        self.groups: Sequence[int] = (self.rows,)
        self.schema: pa.Schema = dataset.data.schema.remove_metadata()
        self._dataset = dataset
        self._wanted = [
            name
            for name in dict.fromkeys((*wanted.needed, *wanted.carried))
            if name in self.schema.names
        ]
        # one value, not two: several threads ask for the identity
        self._last_look = (self._look(), self._hash_rows())
        self.looked_at: dict[str, int | str] = {"content": self._last_look[1]}

    def identity(self) -> dict[str, int | str]:
        """The hash of the values of the wanted columns, however `datasets` stores them."""
        stamps, last = self._look(), self._last_look
        if stamps != last[0]:
            last = self._last_look = (stamps, self._hash_rows())
        return {"content": last[1]}

    def open(self, columns: Sequence[str], row: int, batch_rows: int) -> Place:
        return _DatasetPlace(self, columns, row, batch_rows)

    def batches(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        rows = self.arrow(schema.names)
        for start in range(0, self.rows, CARRIED_BATCH_ROWS):
            stop = min(start + CARRIED_BATCH_ROWS, self.rows)
            if schema.names:
                yield from rows[start:stop].combine_chunks().to_batches()
            else:
                yield batch_without_columns(stop - start)

    def arrow(self, columns: Sequence[str]) -> Any:
        """The dataset so that a slice of it is an Arrow table of these columns."""
        return self._dataset.select_columns(list(columns)).with_format("arrow")

    def _look(self) -> list[tuple[str, int, int]]:
        paths = [Path(file["filename"]) for file in self._dataset.cache_files]
        looks = [(str(path), path.stat()) for path in paths]
        return [(path, status.st_size, status.st_mtime_ns) for path, status in looks]

    def _hash_rows(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        digest.update(
            str([(name, str(self.schema.field(name).type)) for name in self._wanted]).encode()
        )
        wanted = pa.schema([self.schema.field(name) for name in self._wanted])
        for batch in self.batches(wanted) if self._wanted else ():
            digest.update(batch.replace_schema_metadata(None).serialize())
        return digest.hexdigest()


class _DatasetPlace:
    """The next row of a dataset."""

    def __init__(
        self, content: DatasetContent, columns: Sequence[str], row: int, batch_rows: int
    ) -> None:
        self._rows = content.arrow(columns)
        self._columns = columns
        self._batch_rows = batch_rows
        self.row = row

    def leads_to(self, row: int) -> bool:
        return True

    def forward_to(self, row: int) -> None:
        self.row = row

    def next_records(self, stop: int) -> Sequence[Record]:
        stop = min(self.row + self._batch_rows, stop)
        records: Sequence[Record] = [{} for _ in range(stop - self.row)]
        if self._columns:
            records = first_records(self._rows[self.row : stop], self._columns)
        self.row += len(records)
        return records

    def close(self) -> None:
        self._rows = None


def _loaded(name: str, folder: Path, split: str) -> Any:
    from datasets import load_dataset

    return load_dataset(str(folder) if folder.is_dir() else name, split=split)


def _saved(table: InputTable, folder: Path) -> Any:
    from datasets import DatasetDict, load_from_disk

    dataset = load_from_disk(str(folder))
    asked = "split" in table.model_fields_set
    if not isinstance(dataset, DatasetDict):
        known = {str(dataset.split): dataset} if asked and dataset.split else {table.split: dataset}
    else:
        known = dict(dataset)
    if table.split not in known:
        raise ConfigError(
            f"`{folder}` has no split `{table.split}`",
            hint=f"set `input.split`: its splits are {', '.join(f'`{s}`' for s in known)}",
        )
    return known[table.split]


def _copied(name: str, folder: Path, split: str, cache: Path, limit: int | None) -> Path:
    """Copy a streamed dataset into Parquet files, once; return their folder.

    What a killed worker left is begun again. Of two workers the first to finish wins.
    """
    source = {"dataset": name, "split": split, "limit": limit}
    key = hashlib.blake2b(json.dumps(source).encode(), digest_size=8).hexdigest()
    target = cache / key
    with reading(cache):
        if target.is_dir():
            # whoever gave it its name may have died before that was on the disk
            sync(cache)
            return target
        make_folder(cache)
        _remove_leftovers(cache)
        growing = cache / f"{key}.{socket.gethostname()}.{os.getpid()}"
        growing.mkdir()
        log.info("copying the rows of %s into %s", name, target)
        try:
            with _asking(name, folder):
                _write_files(_stream(name, folder, split, limit), growing, split.replace("/", "_"))
            _publish(growing, target)
        finally:
            shutil.rmtree(growing, ignore_errors=True)
    return target


def _stream(name: str, folder: Path, split: str, limit: int | None) -> Iterator[pa.Table]:
    from datasets import load_dataset

    place = str(folder) if folder.is_dir() else name
    rows = load_dataset(place, split=split, streaming=True)
    rows = rows if limit is None else rows.take(limit)
    tables: Iterator[pa.Table] = rows.with_format("arrow").iter(batch_size=_FETCH_ROWS)
    yield from tables


def _write_files(tables: Iterator[pa.Table], folder: Path, split: str) -> None:
    count = 0
    for first in tables:
        more = islice(tables, _FILE_ROWS // _FETCH_ROWS - 1)
        # the types of a stream without declared ones may change on the way
        rows = pa.concat_tables(chain([first], more), promote_options="permissive")
        path = folder / f"{split}-{count:05d}.parquet"
        pq.write_table(rows.replace_schema_metadata(None), path)
        sync(path)
        count += 1
    if not count:
        raise ConfigError(f"split `{split}` has no rows", hint="set another `input.split`")
    sync(folder)


def _publish(growing: Path, target: Path) -> None:
    try:
        growing.rename(target)
    except OSError:
        # another worker was first: its copy is as good
        if not target.is_dir():
            raise
    sync(target.parent)


def _remove_leftovers(cache: Path) -> None:
    """Remove what workers of this host left unfinished that are no more."""
    for path in cache.glob(f"*.{socket.gethostname()}.*"):
        pid = path.name.rpartition(".")[2]
        if pid.isdigit() and (int(pid) == os.getpid() or not Path("/proc", pid).exists()):
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _asking(name: str, folder: Path) -> Iterator[None]:
    """Keep `datasets` from drawing bars, and turn what it raises into an error of ours."""
    from datasets.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    silent = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    except JobError:
        raise
    # it lets the errors of its readers and of the hub's client through, whatever they are
    except Exception as failure:
        raise _error(name, folder, failure) from failure
    finally:
        if not silent:
            enable_progress_bars()


def _error(name: str, folder: Path, failure: Exception) -> JobError:
    from datasets.exceptions import DataFilesNotFoundError, DatasetNotFoundError

    if isinstance(failure, DatasetNotFoundError):
        return _missing(name, folder)
    said = f"`input.dataset` is `{name}`: {str(failure) or type(failure).__name__}"
    # a split or configuration that is not there, a dataset that wants to run code
    if isinstance(failure, DataFilesNotFoundError | ValueError | RuntimeError | ImportError):
        return ConfigError(said, hint="check `input.dataset` and `input.split`")
    return InfrastructureError(
        said,
        hint="check the network and the disk, then run again: what was fetched is kept",
    )


def _missing(name: str, folder: Path) -> ConfigError:
    return ConfigError(
        f"`input.dataset` is `{name}`, but there is no folder `{folder}` and no such hub dataset",
        hint="give a folder (relative to the job file) or a hub id `org/name`; "
        "a private dataset needs `hf auth login`",
    )
