"""Texts whose lengths are written as differences: what they take is known before Arrow decodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.data.input.formats import bounds
from jobrunner.data.input.formats.codecs import decompressed
from jobrunner.data.input.formats.deltas import check_lengths, shared_bytes
from jobrunner.data.input.formats.pages import chunk_size, delta_bytes
from jobrunner.errors import ConfigError, InfrastructureError
from tests.data.reading import look, values_of
from tests.properties import examples

COMPRESSIONS = ["none", "snappy", "gzip", "zstd", "brotli", "lz4"]
TEXTS = ["a", None, "abc", "abcd" * 9, "abcd" * 10, "", "é", "è" * 40, None]


def written(folder: Path, column: Any, encoding: str, **options: Any) -> Path:
    """A file with one column `prompt` in one encoding."""
    path = folder / "a.parquet"
    leaf = "prompt.list.element" if pa.types.is_list(column.type) else "prompt"
    pq.write_table(
        pa.table({"prompt": column}),
        path,
        use_dictionary=False,
        column_encoding={leaf: encoding},
        write_statistics=False,
        **options,
    )
    return path


def shared_in(path: Path) -> int:
    footer = pq.read_metadata(path)
    with path.open("rb") as file:
        chunk = footer.row_group(0).column(0)
        assert chunk_size(file, chunk).deltas
        return delta_bytes(file, footer, 0, 0)


def shared_by(texts: list[str | None]) -> int:
    encoded = [b"", *(text.encode() for text in texts if text is not None)]
    return sum(map(beginning, encoded, encoded[1:]))


def beginning(one: bytes, other: bytes) -> int:
    """How many bytes two texts begin with both."""
    shorter = min(len(one), len(other))
    return next((n for n in range(shorter) if one[n] != other[n]), shorter)


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("lists", [False, True], ids=["texts", "lists"])
def test_what_texts_share_is_told_exactly(
    tmp_path: Path, version: str, compression: str, lists: bool
) -> None:
    column = [TEXTS[:4], None, [], TEXTS[4:]] if lists else TEXTS
    path = written(
        tmp_path,
        pa.array(column),
        "DELTA_BYTE_ARRAY",
        compression=compression,
        data_page_version=version,
    )
    # the first letters of é and è are one byte of two
    assert shared_in(path) == shared_by(TEXTS) == 1 + 3 + 36 + 1
    assert values_of(look(path, ["prompt"]), "prompt") == column


@pytest.mark.parametrize("count", [0, 1, 2, 32, 33, 34, 128, 129, 130, 257, 20_000])
def test_any_number_of_texts_is_told(tmp_path: Path, count: int) -> None:
    texts: list[str | None] = ["abcdefgh"[: n % 9] for n in range(count)]
    path = written(tmp_path, pa.array([None, *texts], pa.string()), "DELTA_BYTE_ARRAY")
    assert shared_in(path) == shared_by(texts)


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_texts_after_their_lengths_share_nothing(tmp_path: Path, version: str) -> None:
    path = written(tmp_path, pa.array(TEXTS), "DELTA_LENGTH_BYTE_ARRAY", data_page_version=version)
    assert shared_in(path) == 0
    assert values_of(look(path, ["prompt"]), "prompt") == TEXTS


def test_each_page_begins_anew(tmp_path: Path) -> None:
    path = written(
        tmp_path, pa.array(["abcd"] * 10), "DELTA_BYTE_ARRAY", write_batch_size=1, data_page_size=1
    )
    assert shared_in(path) == 0


@examples(100)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=300))
def test_lengths_are_unpacked_as_arrow_packs_them(numbers: list[int]) -> None:
    packed = packed_by_arrow(numbers)
    negative = sum(number < 0 for number in numbers)
    shared = shared_bytes(memoryview(packed + varint(128) + b"\x01\x00\x00"), len(numbers))
    assert shared == sum(numbers) + negative * 2**32


def packed_by_arrow(numbers: list[int]) -> bytes:
    """What Arrow makes of numbers of 32 bits in DELTA_BINARY_PACKED."""
    sink = pa.BufferOutputStream()
    pq.write_table(
        pa.table({"n": pa.array(numbers, pa.int32())}, schema=NOT_NULL),
        sink,
        compression="none",
        use_dictionary=False,
        column_encoding={"n": "DELTA_BINARY_PACKED"},
        write_statistics=False,
    )
    content = sink.getvalue().to_pybytes()
    chunk = pq.read_metadata(pa.BufferReader(content)).row_group(0).column(0)
    start = content.index(varint(128) + b"\x04" + varint(len(numbers)))
    return content[start : chunk.data_page_offset + chunk.total_compressed_size]


NOT_NULL = pa.schema([pa.field("n", pa.int32(), nullable=False)])


def varint(number: int) -> bytes:
    if number < 128:
        return bytes([number])
    return bytes([number & 127 | 128]) + varint(number >> 7)


def lengths(count: int, in_block: int = 128, parts: int = 1, first: int = 0) -> bytes:
    """The start of lengths: after it come their differences."""
    return b"".join(map(varint, (in_block, parts, count, first)))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        lengths(3)[:-1],
        lengths(3, in_block=0),
        lengths(3, parts=0),
        lengths(3, in_block=96, parts=2),
        lengths(3, in_block=2**32 - 128, parts=2**27),
        lengths(3),
        lengths(3) + b"\x00\x21" + bytes(2_000),
        lengths(3) + b"\x00\x20" + bytes(511),
        b"\xff" * 20,
        lengths(0),
        lengths(3) + b"\x00\x00",
    ],
)
def test_damaged_lengths_are_an_error(content: bytes) -> None:
    with pytest.raises(pa.ArrowInvalid, match="lengths of a page are damaged"):
        shared_bytes(memoryview(content), 3)


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
def test_more_lengths_than_values_are_an_error_of_the_file(tmp_path: Path, encoding: str) -> None:
    """Arrow allocates four bytes for each; all of these are two bytes in the file."""
    path = written(tmp_path, pa.array([f"abcdefgh{n}" for n in range(100)]), encoding)
    content = bytearray(path.read_bytes())
    start = content.index(lengths(100, parts=4)[:-1])
    bomb = lengths(2**31 - 1, in_block=2**31 - 128) + b"\x00\x00"
    content[start : start + len(bomb)] = bomb
    path.write_bytes(content)
    with pytest.raises(InfrastructureError, match="page of 100 values has 2,147,483,647 lengths"):
        values_of(look(path, ["prompt"]), "prompt")


def test_the_second_lengths_are_looked_at_too() -> None:
    content = memoryview(lengths(1) + lengths(4))
    check_lengths(content, 1)
    with pytest.raises(pa.ArrowInvalid, match="a page of 3 values has 4 lengths"):
        shared_bytes(content, 3)


def test_lists_of_texts_that_share_too_much_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "LISTS_BYTES", 30_000)
    monkeypatch.setattr(bounds, "MOST_TIMES", 2)
    lists = pa.array([["x" * 1_000] * 10] * 2)
    path = written(tmp_path, lists, "DELTA_BYTE_ARRAY")
    assert values_of(look(path, ["prompt"]), "prompt") == lists.to_pylist()
    monkeypatch.setattr(bounds, "LISTS_BYTES", 20_000)
    with pytest.raises(ConfigError, match=r"lists of row group 0 of `.*` have [0-9]+ bytes that"):
        values_of(look(path, ["prompt"]), "prompt")


@pytest.mark.parametrize("frames", [1, 3])
def test_lz4_is_read_in_the_frames_of_hadoop(frames: int) -> None:
    content, size = b"", 0
    for n in range(frames):
        part = b"abc%d" % n * 100
        raw = pa.Codec("lz4_raw").compress(part, asbytes=True)
        content += len(part).to_bytes(4, "big") + len(raw).to_bytes(4, "big") + raw
        size += len(part)
    expected = b"".join(b"abc%d" % n * 100 for n in range(frames))
    assert decompressed(memoryview(content), "UNKNOWN", size) == expected
    for cut in (content[:-1], content + b"\x00"):
        with pytest.raises(pa.ArrowInvalid, match="cannot be decompressed"):
            decompressed(memoryview(cut), "UNKNOWN", size)


@pytest.mark.parametrize(
    "compression", ["SNAPPY", "GZIP", "ZSTD", "BROTLI", "LZ4", "UNKNOWN", "LZO"]
)
def test_a_page_that_cannot_be_decompressed_is_an_error(compression: str) -> None:
    with pytest.raises(pa.ArrowInvalid, match="cannot be decompressed"):
        decompressed(memoryview(b"\xffabc" * 5), compression, 100)
