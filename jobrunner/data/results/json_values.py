"""Turn Arrow columns into values that strict JSON can hold. Knows nothing of files.

NaN and infinities become null, bytes base64 text, dates and times ISO 8601 text (an instant in
UTC, with a Z), durations ISO 8601 text of seconds, decimals text, maps lists of keys and values,
text that is not UTF-8 has U+FFFD where it is not.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

_UNITS_A_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def json_values(column: pa.Array) -> list[Any]:
    """Turn a column into JSON values, one a row."""
    if isinstance(column, pa.ChunkedArray):
        return [value for chunk in column.chunks for value in json_values(chunk)]
    if isinstance(column, pa.ExtensionArray):
        return json_values(column.storage)
    for is_type, convert in _CONVERSIONS:
        if is_type(column.type):
            return convert(column)
    return [None if value is None else str(value) for value in column.to_pylist()]


def _as_they_are(column: pa.Array) -> list[Any]:
    values: list[Any] = column.to_pylist()
    return values


def _floats(column: pa.Array) -> list[Any]:
    return [
        None if value is None or not math.isfinite(value) else value for value in column.to_pylist()
    ]


def _texts(column: pa.Array) -> list[Any]:
    try:
        return _as_they_are(column)
    except UnicodeDecodeError:
        # a Parquet file may say that any bytes are text
        values = column.cast(pa.large_binary()).to_pylist()
        return [None if value is None else value.decode(errors="replace") for value in values]


def _bytes(column: pa.Array) -> list[Any]:
    return [
        None if value is None else base64.b64encode(value).decode("ascii")
        for value in column.to_pylist()
    ]


def _dates_and_times(column: pa.Array) -> list[Any]:
    """Arrow spells these, as Python has neither nanoseconds nor years beyond 9999."""
    if types.is_timestamp(column.type) and column.type.tz is not None:
        column = column.cast(pa.timestamp(column.type.unit, "UTC"))
    spelled = column.cast(pa.string()).to_pylist()
    # what Arrow cannot spell, it says in words
    return [v if v is None or v.startswith("<") else v.replace(" ", "T", 1) for v in spelled]


def _durations(column: pa.Array) -> list[Any]:
    second = _UNITS_A_SECOND[column.type.unit]
    counts = column.view(pa.int64()).to_pylist()
    return [None if n is None else f"PT{Decimal(n) / second:f}S" for n in counts]


def _decimals(column: pa.Array) -> list[Any]:
    return [None if value is None else f"{value:f}" for value in column.to_pylist()]


def _lists(column: pa.Array) -> list[Any]:
    entries = json_values(column.flatten())
    values: list[Any] = []
    start = 0
    for size in pc.list_value_length(column).to_pylist():
        values.append(None if size is None else entries[start : start + size])
        start += size or 0
    return values


def _maps(column: pa.Array) -> list[Any]:
    entry = pa.struct([column.type.key_field, column.type.item_field])
    return _lists(column.cast(pa.list_(entry)))


def _structs(column: pa.Array) -> list[Any]:
    names = [field.name for field in column.type]
    fields = [json_values(field) for field in column.flatten()]
    rows = zip(*fields, strict=True) if fields else ((),) * len(column)
    valid = column.is_valid().to_pylist()
    return [
        dict(zip(names, row, strict=True)) if there else None
        for row, there in zip(rows, valid, strict=True)
    ]


def _dictionaries(column: pa.Array) -> list[Any]:
    words = json_values(column.dictionary)
    return [None if index is None else words[index] for index in column.indices.to_pylist()]


_CONVERSIONS: list[tuple[Callable[[pa.DataType], bool], Callable[[pa.Array], list[Any]]]] = [
    (lambda t: types.is_boolean(t) or types.is_integer(t) or types.is_null(t), _as_they_are),
    (types.is_floating, _floats),
    (lambda t: types.is_string(t) or types.is_large_string(t) or t == pa.string_view(), _texts),
    (
        lambda t: (
            types.is_binary(t)
            or types.is_large_binary(t)
            or types.is_fixed_size_binary(t)
            or t == pa.binary_view()
        ),
        _bytes,
    ),
    (lambda t: types.is_date(t) or types.is_time(t) or types.is_timestamp(t), _dates_and_times),
    (types.is_duration, _durations),
    (types.is_decimal, _decimals),
    (types.is_map, _maps),
    (
        lambda t: types.is_list(t) or types.is_large_list(t) or types.is_fixed_size_list(t),
        _lists,
    ),
    (types.is_struct, _structs),
    (types.is_dictionary, _dictionaries),
]
