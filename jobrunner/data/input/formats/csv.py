"""Read CSV: a header, then records with a text for each column of it; RFC 4180, in UTF-8."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Sequence

import pyarrow as pa

from jobrunner.data.input.files import File
from jobrunner.data.input.formats.content import Record
from jobrunner.data.input.formats.lines import LINE_BYTES, Lines, LineTooLong
from jobrunner.data.input.formats.text import TextContent, look_at_text
from jobrunner.errors import ConfigError
from jobrunner.records import RowError


def look_at_csv(file: File) -> TextContent:
    """Read a file once. Raises ConfigError where its header cannot be used."""

    def open_syntax(lines: Lines) -> tuple[CommaSeparated, pa.Schema]:
        header = _header(file, lines)
        return CommaSeparated(header), pa.schema([pa.field(name, pa.string()) for name in header])

    return look_at_text(file, open_syntax)


class CommaSeparated:
    """The syntax of CSV under a header."""

    format = "csv"

    def __init__(self, header: Sequence[str]) -> None:
        self._header = header

    def split(self, lines: Lines) -> Iterator[list[str] | RowError]:
        # the module's own limit of 128 KiB is for the whole process and too small for prompts
        csv.field_size_limit(LINE_BYTES)
        # a quote out of place is an error of the record, not a part of its text
        text = _Text(lines)
        reader = csv.reader(text, strict=True)
        while True:
            text.record_bytes = 0
            try:
                fields = next(reader, None)
            except LineTooLong:
                yield RowError("bad_text", f"the record is over {LINE_BYTES:,} bytes")
                continue
            except csv.Error as error:
                yield RowError("bad_text", f"the record is not CSV: {error}")
                continue
            if fields is None:
                return
            if fields:
                yield fields

    def parse(self, raw: list[str] | RowError) -> Record:
        if isinstance(raw, RowError):
            return raw
        if len(raw) != len(self._header):
            return RowError(
                "bad_type",
                f"the record has {len(raw):,} fields, the header {len(self._header):,}",
            )
        for name, field in zip(self._header, raw, strict=True):
            if not _is_utf8(field):
                return RowError("bad_text", f"the field of column `{name}` is not UTF-8")
        return dict(zip(self._header, raw, strict=True))


class _Text:
    """Lines as text; a byte that is not UTF-8 becomes a surrogate, to be found in its field.

    Where a record has so many lines that it is over `LINE_BYTES`, it is as if one line were.
    """

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self.record_bytes = 0

    def __iter__(self) -> _Text:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.record_bytes += len(line)
        if self.record_bytes > LINE_BYTES + 1:
            raise LineTooLong
        return line.decode(errors="surrogateescape")


def _header(file: File, lines: Lines) -> list[str]:
    header = next(CommaSeparated(()).split(lines), [])
    if isinstance(header, RowError):
        raise ConfigError(f"the header of `{file}` cannot be read: {header.message}")
    for name, count in Counter(header).items():
        if count > 1:
            raise ConfigError(
                f"`{file}` has {count} columns `{name}`", hint="give each column its own name"
            )
        if not _is_utf8(name):
            raise ConfigError(f"the header of `{file}` is not UTF-8", hint="write it as UTF-8")
    return header


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
