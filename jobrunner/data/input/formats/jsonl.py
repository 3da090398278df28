"""Read JSON Lines: an object a line, blank lines left out, a bad line an error of its row."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pyarrow as pa

from jobrunner.data.input.files import File
from jobrunner.data.input.formats.content import Record, Wanted
from jobrunner.data.input.formats.kept import Kind, field_of, kind_of
from jobrunner.data.input.formats.lines import LINE_BYTES, Lines, LineTooLong
from jobrunner.data.input.formats.text import TextContent, look_at_text
from jobrunner.data.json_text import read_json_text
from jobrunner.records import RowError

# names of columns that a person is told of
_MOST_NAMES = 100


def look_at_jsonl(file: File, survey: Survey) -> TextContent:
    """Read a file once; what its records hold goes into the survey of the whole input."""
    return look_at_text(file, lambda _: (JsonLines(), pa.schema([])), survey.see)


class JsonLines:
    """The syntax of JSON Lines."""

    format = "jsonl"

    def __init__(self) -> None:
        self._decoder = json.JSONDecoder(parse_constant=_refuse, parse_float=_float)

    def split(self, lines: Lines) -> Iterator[bytes | RowError]:
        while True:
            try:
                line = next(lines, None)
            except LineTooLong:
                yield RowError("bad_text", f"the line is over {LINE_BYTES:,} bytes")
                continue
            if line is None:
                return
            if line and not line.isspace():
                yield line

    def parse(self, raw: bytes | RowError) -> Record:
        if isinstance(raw, RowError):
            return raw
        try:
            value = read_json_text(raw.decode(), self._decoder.decode)
        except UnicodeDecodeError as error:
            place = f"byte 0x{raw[error.start]:02x} at position {error.start:,} of the line"
            return RowError("bad_text", f"the line is not UTF-8: {place}")
        except json.JSONDecodeError as error:
            place = f"{error.msg} at character {error.pos:,} of the line"
            return RowError("bad_text", f"the line is not JSON: {place}")
        except ValueError as error:
            return RowError("bad_text", f"the line is not JSON: {error}")
        if not isinstance(value, dict):
            return RowError("bad_type", f"the line is {_name(value)}, not an object")
        return value


class Survey:
    """Gathers over all files which columns records have, and of what kinds the kept ones are.

    Where no column is kept, records are parsed only until every needed column was seen.
    """

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._missing = {*wanted.needed, *wanted.carried}
        self._names: dict[str, None] = {}
        self._kinds: dict[str, set[Kind]] = {name: set() for name in wanted.carried}

    def see(self, record: Record) -> bool:
        """Take in a record; return whether another one could say more."""
        if not isinstance(record, RowError):
            if self._missing:
                self._missing -= record.keys()
                self._note_names(record)
            for name, kinds in self._kinds.items():
                kinds.add(kind_of(record.get(name)))
        return bool(self._missing or self._kinds)

    def schema(self) -> pa.Schema:
        """The columns found: the kept ones with their types, all others without one.

        Where not a single record could be read, all wanted ones count as found.
        """
        names: Collection[str] = self._names or self._missing
        found = [pa.field(name, pa.null()) for name in names if name not in self._kinds]
        found += [
            field_of(name, kinds)
            for name, kinds in self._kinds.items()
            if name not in self._missing or not self._names
        ]
        return pa.schema(found)

    def as_json(self) -> Sequence[str]:
        """The kept columns whose values are written as JSON."""
        return [field.name for field in self.schema() if field.metadata]

    def _note_names(self, record: Any) -> None:
        for name in record:
            if len(self._names) < _MOST_NAMES or name in self._wanted.needed:
                self._names[name] = None


def _refuse(constant: str) -> object:
    raise ValueError(f"it has {constant}")


def _float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {text[:20]} is beyond 64 bits")
    return value


def _name(value: object) -> str:
    """What JSON calls a value that is no object."""
    if value is None:
        return "null"
    names: dict[type, str] = {bool: "a boolean", str: "a string", list: "an array"}
    return names.get(type(value), "a number")
