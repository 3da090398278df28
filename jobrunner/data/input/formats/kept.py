"""Give kept values of JSON one type for all shards, and write them in it."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Literal

import pyarrow as pa

Kind = Literal["null", "bool", "int", "long", "big", "float", "text", "nested"]

# marks a column whose values are written as JSON: its text columns are not all text by themselves
AS_JSON = {b"cbjob": b"json"}
# integers up to here are exact as double
_EXACT = 2**53
_INT64 = 2**63


def kind_of(value: object) -> Kind:
    """Say what a value of JSON is, as far as the type of its column depends on it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        if -_EXACT <= value <= _EXACT:
            return "int"
        return "long" if -_INT64 <= value < _INT64 else "big"
    if isinstance(value, float):
        return "float"
    return "text" if isinstance(value, str) else "nested"


def field_of(name: str, kinds: Collection[Kind]) -> pa.Field:
    """The type of a column with values of these kinds: nothing is lost, whatever it has to be."""
    found = set(kinds) - {"null"}
    if found <= {"text"}:
        return pa.field(name, pa.string())
    if found == {"bool"}:
        return pa.field(name, pa.bool_())
    if found <= {"int", "long"}:
        return pa.field(name, pa.int64())
    if found <= {"int", "float"}:
        return pa.field(name, pa.float64())
    return pa.field(name, pa.string(), metadata=AS_JSON)


def to_array(values: Sequence[object], field: pa.Field) -> pa.Array:
    """Write values in the type that `field_of` gave; None is null."""
    if pa.types.is_string(field.type):
        spell = _json if field.metadata == AS_JSON else _text
        return pa.array([None if v is None else spell(v) for v in values], field.type)
    if pa.types.is_float64(field.type):
        values = [float(v) if isinstance(v, int) else v for v in values]
    return pa.array(values, field.type)


def _json(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    # escapes keep what UTF-8 cannot
    return text if _is_unicode(text) else json.dumps(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise pa.ArrowInvalid(f"a text was expected, not {type(value).__name__}")
    return (
        value
        if _is_unicode(value)
        else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    )


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
