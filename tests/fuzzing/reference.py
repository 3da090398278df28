"""Read inputs and results the slow and obvious way. Knows nothing of jobrunner's readers."""

from __future__ import annotations

import csv
import gzip
import json
import math
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

# what JSON may be nested in a row
MOST_LEVELS = 128
# a record that cannot be read, and one of which nothing is known but that it is there
BROKEN = object()
UNKNOWN = object()


def read_input(path: Path) -> list[Any]:
    """The records of a file: mappings, BROKEN or UNKNOWN."""
    if path.suffix == ".parquet":
        return _read_parquet(path)
    content = _decompressed(path.read_bytes())
    return _read_csv(content) if ".csv" in path.suffixes else _read_json_lines(content)


def read_result(path: Path, names: Collection[str]) -> list[dict[str, Any]]:
    """Some columns of a result file, read as strictly as its format wants."""
    if path.name.endswith(".parquet"):
        table = pq.read_table(path)
        table = table.select([name for name in table.column_names if name in names])
        rows: list[dict[str, Any]] = table.to_pylist()
        return rows
    return [{name: row[name] for name in row if name in names} for row in read_strict_lines(path)]


def read_strict_lines(path: Path) -> list[dict[str, Any]]:
    """All objects of a file of JSON Lines, none of them blank or with NaN."""
    content = _decompressed(path.read_bytes()).decode()
    assert not content or content.endswith("\n"), f"{path} ends in the middle of a line"
    lines = content.split("\n")[:-1]
    return [json.loads(line, parse_constant=_refuse) for line in lines]


def _read_parquet(path: Path) -> list[Any]:
    rows = pq.read_metadata(path).num_rows
    try:
        ids = pq.read_table(path, columns=["id"])["id"].to_pylist()
    except (pa.ArrowException, OSError, KeyError, ValueError):
        return [UNKNOWN] * rows
    return [{"id": value} for value in ids]


def _read_json_lines(content: bytes) -> list[Any]:
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return [_json(line) for line in lines if line and not line.isspace()]


def _json(line: bytes) -> Any:
    try:
        if _levels(line) > MOST_LEVELS:
            return BROKEN
        value = json.loads(line.decode(), parse_constant=_refuse, parse_float=_finite)
    except ValueError:
        return BROKEN
    return value if isinstance(value, dict) else BROKEN


def _levels(line: bytes) -> int:
    level = deepest = 0
    for byte in re.sub(rb'"(\\.|[^"\\])*"', b"", line):
        level += (byte in b"[{") - (byte in b"]}")
        deepest = max(deepest, level)
    return deepest


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(text)
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


def _read_csv(content: bytes) -> list[Any]:
    text = content.removeprefix(b"\xef\xbb\xbf").decode(errors="surrogateescape")
    # a record may go over several lines, and a line ends with a line feed
    reader = csv.reader([f"{line}\n" for line in text.split("\n")], strict=True)
    records = list(_csv_records(reader))
    if not records:
        return []
    header, *rows = records
    return [_csv_record(row, header) for row in rows]


def _csv_record(row: list[str] | None, header: list[str] | None) -> Any:
    if row is None or header is None or len(row) != len(header):
        return BROKEN
    if any("\udc80" <= character <= "\udcff" for field in row for character in field):
        return BROKEN
    return dict(zip(header, row, strict=True))


def _csv_records(reader: Any) -> Iterator[list[str] | None]:
    """Yield record after record, None for a broken one; blank lines are none."""
    while True:
        try:
            record = next(reader)
        except csv.Error:
            yield None
        except StopIteration:
            return
        else:
            if record:
                yield record


def _decompressed(content: bytes) -> bytes:
    if content.startswith(b"\x1f\x8b"):
        return gzip.decompress(content)
    if content.startswith(b"\x28\xb5"):
        with pa.CompressedInputStream(pa.BufferReader(content), "zstd") as stream:
            return bytes(stream.read())
    return content
