"""Count, find and read the records of text files. Knows nothing of how a record is spelled."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import Any, Protocol

import pyarrow as pa

from jobrunner.data.input.files import File, Stamp, changed_meanwhile, unreadable
from jobrunner.data.input.formats.content import (
    CARRIED_BATCH_ROWS,
    Place,
    Record,
    batch_without_columns,
)
from jobrunner.data.input.formats.kept import to_array
from jobrunner.data.input.formats.lines import Lines
from jobrunner.errors import ConfigError, InfrastructureError
from jobrunner.records import RowError

# rows from one remembered place in a file to the next
MARK_ROWS = 2048
# a batch of rows ends early once it has read so much of the file
_BATCH_BYTES = 4 * 2**20


class Syntax(Protocol):
    """How records are spelled in lines: `split` is cheap, `parse` does the work."""

    @property
    def format(self) -> str: ...

    def split(self, lines: Lines) -> Iterator[Any]:
        """Yield one raw record after another; reads no line before it needs it."""

    def parse(self, raw: Any) -> Record:
        """The columns of a raw record, or why it has none."""


class TextContent:
    """A text file as one look through it found it.

    `marks` are the offsets of rows 0, MARK_ROWS, 2 MARK_ROWS and so on.
    """

    def __init__(
        self,
        file: File,
        syntax: Syntax,
        schema: pa.Schema,
        *,
        marks: Sequence[int],
        rows: int,
        stamp: Stamp,
        content: str,
        compressed: bool,
    ) -> None:
        self.file = file
        self.syntax = syntax
        self.schema = schema
        self.rows = rows
        self.groups = (rows,)
        self.format = syntax.format
        self.compressed = compressed
        self._marks = marks
        self.looked_at: dict[str, int | str] = {"size": stamp.size, "content": content}
        self._last_look = (stamp, content)

    def identity(self) -> dict[str, int | str]:
        """Size and hash of all bytes; hashed again only if the file's size or time changed."""
        stamp = self.file.stamp()
        if stamp != self._last_look[0]:
            self._last_look = (stamp, _hash(self.file))
        return {"size": stamp.size, "content": self._last_look[1]}

    def open(self, columns: Sequence[str], row: int, batch_rows: int) -> Place:
        return _TextPlace(self, columns, row, batch_rows)

    def batches(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        with closing(_TextPlace(self, schema.names, 0, CARRIED_BATCH_ROWS)) as place:
            while place.row < self.rows:
                records = place.next_records(self.rows)
                arrays = [
                    to_array([_kept(record, field.name) for record in records], field)
                    for field in schema
                ]
                if arrays:
                    yield pa.RecordBatch.from_arrays(arrays, schema=schema)
                else:
                    yield batch_without_columns(len(records))

    def open_lines(self, row: int) -> tuple[Lines, int]:
        """Open the file at the last mark at or before `row`; return that mark's row, too."""
        if self.identity() != self.looked_at:
            raise InfrastructureError(
                f"`{self.file}` changed while the job ran",
                hint="restore it, then run the same command again",
            )
        mark = row // MARK_ROWS
        lines = Lines(self.file)
        lines.seek(self._marks[mark])
        return lines, mark * MARK_ROWS


class _TextPlace:
    """The next record of a text file."""

    def __init__(
        self, content: TextContent, columns: Sequence[str], row: int, batch_rows: int
    ) -> None:
        self._content = content
        self._columns = tuple(columns)
        self._batch_rows = batch_rows
        self._lines, self.row = content.open_lines(row)
        self._raw = content.syntax.split(self._lines)

    def leads_to(self, row: int) -> bool:
        if row < self.row:
            return False
        return self._content.compressed or row // MARK_ROWS == self.row // MARK_ROWS

    def forward_to(self, row: int) -> None:
        while self.row < row:
            self._next_raw()

    def next_records(self, stop: int) -> Sequence[Record]:
        start = self._lines.offset
        records: list[Record] = []
        while self.row < stop and len(records) < self._batch_rows:
            record = self._content.syntax.parse(self._next_raw())
            if not isinstance(record, RowError):
                record = {name: record.get(name) for name in self._columns}
            records.append(record)
            if self._lines.offset - start > _BATCH_BYTES:
                break
        return records

    def close(self) -> None:
        self._lines.close()

    def _next_raw(self) -> Any:
        for raw in self._raw:
            self.row += 1
            return raw
        raise unreadable(self._content.file, f"it ends after row {self.row:,}")


def look_at_text(
    file: File,
    open_syntax: Callable[[Lines], tuple[Syntax, pa.Schema]],
    observe: Callable[[Record], bool] = lambda record: False,
) -> TextContent:
    """Read a file once: count its rows, hash it, remember places in it.

    `open_syntax` reads the header, if the format has one. `observe` is shown record after record
    until it says that it has seen enough. Raises ConfigError where the file is no text,
    InfrastructureError where it changed meanwhile.
    """
    stamp = file.stamp()
    digest = hashlib.blake2b(digest_size=16)
    try:
        with Lines(file, digest) as lines:
            _refuse_utf16(file, lines)
            syntax, schema = open_syntax(lines)
            marks, rows = _count(lines, syntax, observe)
            lines.drain()
            compressed = lines.compressed
    except OSError as error:
        if error.errno is not None:
            raise
        # no fault of the disk: what it holds cannot be decompressed
        raise ConfigError(
            f"`{file}` cannot be decompressed: {error}",
            hint="copy it again if it is cut short, or take it out of the input",
        ) from error
    if file.stamp() != stamp:
        raise changed_meanwhile(file)
    return TextContent(
        file,
        syntax,
        schema,
        marks=marks,
        rows=rows,
        stamp=stamp,
        content=digest.hexdigest(),
        compressed=compressed,
    )


def _count(
    lines: Lines, syntax: Syntax, observe: Callable[[Record], bool]
) -> tuple[Sequence[int], int]:
    records = syntax.split(lines)
    marks, rows, curious = [lines.offset], 0, True
    while True:
        seen = 0
        for raw in islice(records, MARK_ROWS):
            seen += 1
            curious = curious and observe(syntax.parse(raw))
        rows += seen
        if seen < MARK_ROWS:
            return marks, rows
        marks.append(lines.offset)


def _refuse_utf16(file: File, lines: Lines) -> None:
    if lines.start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise ConfigError(f"`{file}` is UTF-16, not UTF-8", hint="write it again as UTF-8")


def _hash(file: File) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with file.open() as stream:
        while piece := stream.read(2**20):
            digest.update(piece)
    return digest.hexdigest()


def _kept(record: Record, name: str) -> object:
    return None if isinstance(record, RowError) else record[name]
