"""Every kind of Arrow column becomes strict JSON."""

import datetime as dt
import json
import math
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.data.results.json_values import json_values
from tests.properties import examples

NOON = dt.datetime(2024, 2, 29, 12, 0, 1, 500_000)
PARIS = pa.timestamp("ms", "Europe/Paris")
NOT_UTF8 = pa.array([b"a\xff", None], pa.binary()).view(pa.string())

CASES = {
    "numbers": (pa.array([1, None], pa.uint64()), [1, None]),
    "floats": (pa.array([0.5, math.nan, math.inf, -math.inf, None]), [0.5, None, None, None, None]),
    "booleans": (pa.array([True, None]), [True, None]),
    "nulls": (pa.nulls(2), [None, None]),
    "texts": (pa.array(["a", "\u2028é", None], pa.large_string()), ["a", "\u2028é", None]),
    "text views": (pa.array(["a", None], pa.string_view()), ["a", None]),
    "text that is not UTF-8": (NOT_UTF8, ["a\ufffd", None]),
    "bytes": (pa.array([b"\x00\xff", b"", None]), ["AP8=", "", None]),
    "bytes of one length": (pa.array([b"ab", None], pa.binary(2)), ["YWI=", None]),
    "dates": (pa.array([dt.date(2024, 2, 29), None]), ["2024-02-29", None]),
    "dates beyond Arrow's": (pa.array([2**30], pa.date32()), ["<value out of range: 1073741824>"]),
    "dates beyond Python's": (pa.array([3_000_000], pa.date32()), ["10183-09-21"]),
    "times": (pa.array([dt.time(1, 2, 3)], pa.time64("us")), ["01:02:03.000000"]),
    "timestamps": (pa.array([NOON, None], pa.timestamp("ms")), ["2024-02-29T12:00:01.500", None]),
    "nanoseconds": (pa.array([1], pa.timestamp("ns")), ["1970-01-01T00:00:00.000000001"]),
    "instants": (pa.array([NOON], PARIS), ["2024-02-29T12:00:01.500Z"]),
    "durations": (pa.array([1_500, -1, None], pa.duration("ms")), ["PT1.5S", "PT-0.001S", None]),
    "decimals": (pa.array([Decimal("1.50"), None]), ["1.50", None]),
    "small decimals": (pa.array([Decimal("0.0000000012")]), ["0.0000000012"]),
    "lists": (
        pa.array([[1.5, math.nan], None, []], pa.list_(pa.float32())),
        [[1.5, None], None, []],
    ),
    "lists of one length": (
        pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int8(), 2)),
        [[1, 2], None, [3, 4]],
    ),
    "structs": (
        pa.array([{"a": b"x", "b": {"c": 1}}, None, {"a": None, "b": None}]),
        [{"a": "eA==", "b": {"c": 1}}, None, {"a": None, "b": None}],
    ),
    "maps": (
        pa.array([[("k", 0.5)], None], pa.map_(pa.string(), pa.float64())),
        [[{"key": "k", "value": 0.5}], None],
    ),
    "dictionaries": (pa.array(["x", None, "x"]).dictionary_encode(), ["x", None, "x"]),
    "lists of dictionaries": (
        pa.ListArray.from_arrays([0, 1, 2], pa.array(["x", "y"]).dictionary_encode()),
        [["x"], ["y"]],
    ),
    "uuids": (pa.array([b"0123456789abcdef"], pa.uuid()), ["MDEyMzQ1Njc4OWFiY2RlZg=="]),
}


@pytest.mark.parametrize(("column", "expected"), CASES.values(), ids=CASES.keys())
def test_a_column_becomes_json_values(column, expected):
    assert json_values(column) == expected
    json.dumps(json_values(column), allow_nan=False)


@pytest.mark.parametrize(("column", "expected"), CASES.values(), ids=CASES.keys())
def test_a_slice_becomes_the_slice_of_its_values(column, expected):
    assert json_values(column.slice(1)) == expected[1:]
    chunked = pa.chunked_array([column, column.slice(0, 1)])
    assert json_values(chunked) == expected + expected[:1]


@examples(60)
@given(st.lists(st.lists(st.none() | st.lists(st.none() | st.integers(0, 9)), max_size=3)))
def test_nested_lists_equal_what_arrow_says(rows):
    column = pa.array(rows, pa.list_(pa.list_(pa.int64())))
    assert json_values(column) == rows
    assert json_values(column.slice(1)) == rows[1:]
