"""Bytes that are not UTF-8 become U+FFFD wherever a column says that it is text."""

import pyarrow as pa
import pytest

from jobrunner.data.input.utf8 import with_valid_text

RAW = [b"a", None, b"b\xff", b"\xf0\x9f c", b"", "😀".encode()]
TEXTS = ["a", None, "b\ufffd", "\ufffd c", "", "😀"]


def as_text(type_=None):
    type_ = type_ or pa.string()
    binary = pa.large_binary() if type_ == pa.large_string() else pa.binary()
    return pa.array(RAW, binary).view(type_)


def in_lists(values, kind=pa.ListArray):
    offsets = pa.array([0, 2, 2, 6], pa.int64() if kind is pa.LargeListArray else pa.int32())
    return kind.from_arrays(offsets, values, mask=pa.array([False, True, False]))


LISTS = [TEXTS[:2], None, TEXTS[2:]]
COLUMNS = {
    "string": (as_text(), TEXTS),
    "large": (as_text(pa.large_string()), TEXTS),
    "dictionary": (
        pa.DictionaryArray.from_arrays(pa.array([2, 0, None, 2, 3, 5]), as_text()),
        [TEXTS[2], TEXTS[0], None, TEXTS[2], TEXTS[3], TEXTS[5]],
    ),
    "list": (in_lists(as_text()), LISTS),
    "large list": (in_lists(as_text(), pa.LargeListArray), LISTS),
    "struct": (
        pa.StructArray.from_arrays(
            [as_text(), pa.array(range(6))], ["t", "n"], mask=pa.array([False] * 5 + [True])
        ),
        [*({"t": text, "n": n} for n, text in enumerate(TEXTS[:5])), None],
    ),
    "list of structs": (
        in_lists(pa.StructArray.from_arrays([as_text()], ["t"])),
        [[{"t": t} for t in part] if part is not None else None for part in LISTS],
    ),
    "map": (
        pa.MapArray.from_arrays(pa.array([0, 1, 2], pa.int32()), ["k", "l"], as_text()[2:4]),
        [[("k", TEXTS[2])], [("l", TEXTS[3])]],
    ),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_case_M_text_of_any_nesting_is_mended_and_keeps_its_type(name):
    column, expected = COLUMNS[name]
    batch = pa.RecordBatch.from_arrays([column], ["c"])
    mended = with_valid_text(batch)
    mended.validate(full=True)
    assert mended.schema == batch.schema
    assert mended.column("c").to_pylist() == expected


def test_a_batch_of_valid_text_is_left_as_it_is():
    batch = pa.RecordBatch.from_arrays([pa.array(["a", "😀", None])], ["c"])
    assert with_valid_text(batch) is batch
