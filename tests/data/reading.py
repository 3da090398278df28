"""Inputs in any format for the tests of reading, and all that can be read of them."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from jobrunner.data.input.columns import check_columns
from jobrunner.data.input.formats.content import Wanted
from jobrunner.data.input.shards import Shard, cut_spans, find_shards
from jobrunner.data.input.sources import Reader, read_columns
from jobrunner.records import Row

COMPRESSIONS = ("", ".gz", ".zst")


def write_bytes(path: Path, content: bytes) -> Path:
    """Write a text file, compressed as its name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        content = gzip.compress(content)
    if path.suffix == ".zst":
        content = pa.Codec("zstd").compress(content, asbytes=True)
    path.write_bytes(content)
    return path


def look(
    path: Path, needed: Sequence[str] = (), kept: Sequence[str] = (), format_name: str = "auto"
) -> list[Shard]:
    """Find the shards that a path means and check these columns."""
    wanted = Wanted(tuple(needed), tuple(kept))
    shards = find_shards(str(path), path.parent, format_name, wanted)
    check_columns(shards, wanted)
    return shards


def rows_of(shards: Sequence[Shard], column: str | None, others: Sequence[str] = ()) -> list[Row]:
    """Every row of every span."""
    with Reader(shards, column, others) as reader:
        return [r for span in cut_spans(shards) for batch in reader.read(span) for r in batch]


def values_of(shards: Sequence[Shard], column: str) -> list[Any]:
    """The values of a column, the kind of its error for a row that cannot be read."""
    return [row.error.kind if row.error else row.value for row in rows_of(shards, column)]


def kept_of(path: Path, *columns: str) -> pa.Table:
    """Kept columns of all shards in their common types."""
    wanted = Wanted((), columns)
    shards = find_shards(str(path), path.parent, "auto", wanted)
    schema = check_columns(shards, wanted)
    batches = [batch for shard in shards for batch in read_columns(shard, schema)]
    return pa.Table.from_batches(batches, schema)
