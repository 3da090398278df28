"""Make columns of Arrow's hold Unicode text where they say so. Knows nothing of files.

A Parquet file may say that any bytes are text; readers of results refuse the whole file then.
"""

from __future__ import annotations

import pyarrow as pa
from pyarrow import types


def with_valid_text(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Give the batch with U+FFFD for bytes that are not UTF-8, or itself where there are none."""
    if all(_is_valid(column) for column in batch.columns):
        return batch
    columns = [c if _is_valid(c) else _mended(c) for c in batch.columns]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _is_valid(column: pa.Array) -> bool:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _mended(column: pa.Array) -> pa.Array:
    type_ = column.type
    if types.is_string(type_) or types.is_large_string(type_):
        values = column.cast(pa.large_binary()).to_pylist()
        texts = [None if value is None else value.decode(errors="replace") for value in values]
        return pa.array(texts, type_)
    if types.is_dictionary(type_):
        return pa.DictionaryArray.from_arrays(column.indices, _mended(column.dictionary))
    if types.is_map(type_):
        keys, items = _mended(column.keys), _mended(column.items)
        mask = column.is_null()
        return pa.MapArray.from_arrays(column.offsets, keys, items, type=type_, mask=mask)
    if types.is_list(type_) or types.is_large_list(type_):
        values, mask = _mended(column.values), column.is_null()
        return type(column).from_arrays(column.offsets, values, type=type_, mask=mask)
    if types.is_struct(type_):
        fields = [_mended(column.field(place)) for place in range(type_.num_fields)]
        return pa.StructArray.from_arrays(fields, fields=list(type_), mask=column.is_null())
    return column
