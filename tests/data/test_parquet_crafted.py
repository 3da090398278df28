"""Parquet files that no library writes: each is read as Arrow reads it, or refused before that.

Without the bound that each one tests, Arrow would ask for gigabytes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobrunner.data.input.formats import bounds
from jobrunner.data.input.formats.deltas import check_lengths
from jobrunner.data.input.formats.thrift import Thrift
from jobrunner.errors import ConfigError, InfrastructureError
from tests.data import raw_parquet as raw
from tests.data.raw_parquet import Chunk, Coded, binary, boolean, i32, i64, several, struct
from tests.data.reading import look, values_of

TEXTS = [f"text{n:03}" for n in range(200)]
PLAIN_TEXTS = b"".join(raw.after_length(text.encode()) for text in TEXTS)
# 2**31 - 1 lengths, all of them 0, in blocks of almost as many
BOMB = raw.varint(2**31 - 128) + raw.varint(1) + raw.varint(2**31 - 1) + bytes(3)


def lengths(count: int, first: int) -> bytes:
    """So many equal lengths, as differences of no bits."""
    head = b"".join(map(raw.varint, (128, 1, count))) + raw.zigzag(first)
    return head + bytes(2) * -(-(count - 1) // 128)


DELTA_TEXTS = lengths(200, 7) + "".join(TEXTS).encode()


def one_page(pages: bytes, values: int = 200, **options: Any) -> Chunk:
    return Chunk(pages, values, **options)


def read(path: Path) -> list[Any]:
    return values_of(look(path, ["prompt"]), "prompt")


def of_texts(folder: Path, chunk: Chunk, rows: int = 200, **options: Any) -> Path:
    return raw.write(folder / "a.parquet", raw.flat(), [chunk], rows, **options)


def of_one_list(folder: Path, chunk: Chunk, kind: int = raw.BYTE_ARRAY) -> Path:
    return raw.write(folder / "a.parquet", raw.lists(kind), [chunk], 1)


def compressed(content: bytes, codec: str = "zstd") -> bytes:
    return bytes(pa.Codec(codec).compress(content, asbytes=True))


def deep(nesting: int) -> Coded:
    return struct((1, deep(nesting - 1))) if nesting else struct((1, boolean(True)))


UNKNOWN = {
    "a list": several([i32(1)] * 20),
    "a list of lists": several([several([i64(2**40)])] * 3),
    "a short list": Coded(9, bytes([2 << 4 | 6]) + raw.zigzag(-5) + raw.zigzag(2**40)),
    "a set of records": Coded(10, several([deep(3)] * 2).content),
    "a map": Coded(11, b"\x02\x85" + b"".join(b"\x01a" + raw.zigzag(n) for n in range(2))),
    "an empty map": Coded(11, b"\x00"),
    "a text": binary("abc"),
    "a byte": Coded(3, b"\xff"),
    "a small number": Coded(4, raw.zigzag(-9)),
    "a large number": i64(2**62),
    "a floating point number": Coded(7, bytes(8)),
    "a UUID": Coded(13, bytes(16)),
    "records in records": deep(20),
}


@pytest.mark.parametrize("value", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_fields_that_nobody_knows_yet_are_read_past(tmp_path: Path, value: Coded) -> None:
    pages = raw.data_page(200, raw.PLAIN, PLAIN_TEXTS, more=[(30, value), (31, i32(1))])
    assert read(of_texts(tmp_path, one_page(pages))) == TEXTS


def test_a_field_counts_only_in_its_type() -> None:
    coded = struct((1, i64(5)), (2, i32(-5)), (3, binary("a")), (4, boolean(False)), (5, deep(1)))
    assert Thrift(coded.content).struct() == {2: -5, 4: False, 5: {1: {}}}


def header(*fields: tuple[int, Coded], kind: Coded | None = None) -> bytes:
    sizes = [(field, i32(len(BOMB))) for field in (2, 3)]
    return struct((1, kind or i32(0)), *sizes, (5, struct((1, i32(10)), *fields))).content


TEXTS_OF_DELTAS = i32(raw.DELTA_LENGTHS)
LEVELS = ((3, i32(raw.RLE)), (4, i32(raw.RLE)))
# Arrow takes the low 32 bits of a number, and the low 16 of that of a field
DAMAGED = {
    "a number of 33 bits": header((2, Coded(5, raw.varint(2**32 + 12))), *LEVELS),
    "a kind of 33 bits": header((2, TEXTS_OF_DELTAS), *LEVELS, kind=Coded(5, raw.varint(2**32))),
    "a field twice": header((2, TEXTS_OF_DELTAS), *LEVELS, (2, i32(0))),
    "a field in two types": header((2, TEXTS_OF_DELTAS), *LEVELS, (2, i64(0))),
    "a field of 17 bits": header((2, i32(0)), *LEVELS, (2**16 + 2, TEXTS_OF_DELTAS)),
    "a field below 1": header((2, i32(0)), *LEVELS, (2 - 2**16, TEXTS_OF_DELTAS)),
    "a field in another type": header((2, i64(raw.DELTA_LENGTHS)), *LEVELS),
    "a truth for a number": header((2, boolean(True)), *LEVELS),
    "records without end": header((2, TEXTS_OF_DELTAS), *LEVELS, (9, deep(100))),
    "no such type": header((2, TEXTS_OF_DELTAS), *LEVELS, (9, Coded(14, b""))),
    "a list without end": header((9, Coded(9, b"\xf5" + b"\xff" * 8 + b"\x01"))),
}


@pytest.mark.parametrize("head", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_header_that_two_readers_read_in_two_ways_is_damaged(tmp_path: Path, head: bytes) -> None:
    path = of_texts(tmp_path, one_page(head + BOMB, 10), 10)
    with pytest.raises(InfrastructureError, match="a page header is damaged"):
        read(path)


EMPTY = raw.data_page(1, raw.PLAIN, raw.after_length(b"a"))
DICTIONARY = raw.dictionary_page(1, raw.after_length(b"a"))
PAGES = {
    "values beyond the chunk": (
        # Arrow goes on for a hundred bytes
        Chunk(EMPTY + raw.data_page(10, raw.DELTA_LENGTHS, BOMB), 11, size=len(EMPTY)),
        "10 values have no page",
    ),
    "a page beyond the file": (
        Chunk(raw.data_page(11, raw.PLAIN, b"", 5, 2**31 - 1), 11),
        "the page would end at byte 2,147,48",
    ),
    "a page of less than nothing": (
        Chunk(raw.data_page(11, raw.PLAIN, b"", -5), 11),
        "",
    ),
    "a step back": (
        Chunk(raw.data_page(11, raw.PLAIN, b"", 5, -5), 11),
        "",
    ),
    "values of less than nothing": (
        Chunk(raw.data_page(-1, raw.PLAIN, b""), 11),
        "",
    ),
    "a second dictionary": (
        Chunk(2 * DICTIONARY + EMPTY, 11, dictionary=len(DICTIONARY)),
        "a dictionary comes after other pages",
    ),
    "a late dictionary": (
        Chunk(EMPTY + DICTIONARY, 11),
        "a dictionary comes after other pages",
    ),
    "levels longer than the page": (
        Chunk(raw.data_page_v2(11, raw.DELTA_TEXT, bytes(30), 5, (20, 0)), 11, codec=raw.ZSTD),
        "20 bytes of levels are more than the page has",
    ),
    "levels longer than the page in the file": (
        Chunk(raw.data_page_v2(11, raw.DELTA_TEXT, bytes(9), 90, (5, 5)), 11, codec=raw.ZSTD),
        "10 bytes of levels are more than the page has",
    ),
    "levels in no encoding": (
        Chunk(raw.data_page(11, raw.DELTA_TEXT, bytes(9), levels=raw.DELTA_TEXT), 11),
        "there is no encoding 7 of levels",
    ),
}


@pytest.mark.parametrize(("chunk", "why"), PAGES.values(), ids=PAGES.keys())
def test_pages_that_cannot_be_are_damaged(tmp_path: Path, chunk: Chunk, why: str) -> None:
    path = raw.write(
        tmp_path / "a.parquet", raw.flat(optional=True), [chunk], 11, writer="parquet-mr version 1"
    )
    with pytest.raises(InfrastructureError, match=f"a page header is damaged.*{why}"):
        read(path)


@pytest.mark.parametrize("writer", ["", "parquet-cpp-arrow version 1.0.0", "parquet-mr version 1"])
def test_a_page_may_be_left_uncompressed(tmp_path: Path, writer: str) -> None:
    pages = raw.data_page_v2(200, raw.DELTA_LENGTHS, DELTA_TEXTS, compressed=False)
    path = of_texts(tmp_path, one_page(pages, codec=raw.SNAPPY), writer=writer)
    assert read(path) == TEXTS


@pytest.mark.parametrize(
    "writer", ["parquet-cpp version 1.5.1", "PARQUET-CPP  version 9", "parquet-cpp", b"\xff"]
)
def test_a_page_that_arrow_may_decompress_or_not_is_refused(
    tmp_path: Path, writer: str | bytes
) -> None:
    """It decompresses all pages of one writer of old, whatever they say."""
    pages = raw.data_page_v2(200, raw.DELTA_LENGTHS, DELTA_TEXTS, compressed=False)
    path = of_texts(tmp_path, one_page(pages, codec=raw.SNAPPY), writer=writer)
    with pytest.raises(InfrastructureError, match="not told whether the page is compressed"):
        read(path)


def test_too_many_lengths_are_refused() -> None:
    most = 2**24
    check_lengths(memoryview(lengths(most, 0)), 2**30)
    with pytest.raises(pa.ArrowInvalid, match="has 16,777,217 lengths, the limit is 16,777,216"):
        check_lengths(memoryview(lengths(most + 1, 0)), 2**30)


def framed(content: bytes) -> bytes:
    """One frame of Hadoop's."""
    block = compressed(content, "lz4_raw")
    return len(content).to_bytes(4, "big") + len(block).to_bytes(4, "big") + block


@pytest.mark.parametrize(
    ("codec", "content"),
    [
        (raw.LZ4, framed(DELTA_TEXTS)),
        (raw.LZ4, framed(DELTA_TEXTS[:500]) + framed(DELTA_TEXTS[500:])),
        (raw.LZ4, compressed(DELTA_TEXTS, "lz4_raw")),
        (raw.LZ4_RAW, compressed(DELTA_TEXTS, "lz4_raw")),
    ],
)
def test_lz4_is_read_in_frames_and_without(tmp_path: Path, codec: int, content: bytes) -> None:
    pages = raw.data_page(200, raw.DELTA_LENGTHS, content, len(DELTA_TEXTS))
    assert read(of_texts(tmp_path, one_page(pages, codec=codec))) == TEXTS


def test_levels_are_read_as_they_were_packed_of_old(tmp_path: Path) -> None:
    content = b"\xff" * 25 + DELTA_TEXTS
    pages = raw.data_page(200, raw.DELTA_LENGTHS, content, levels=raw.BIT_PACKED)
    chunk = one_page(pages)
    path = raw.write(tmp_path / "a.parquet", raw.flat(optional=True), [chunk], 200)
    assert read(path) == TEXTS


def list_of_one_text(unpacked: int | None = None, kind: int = raw.BYTE_ARRAY) -> Chunk:
    """A list of 20,000 times one text of 900,000 bytes."""
    count = 20_000
    first = raw.dictionary_page(1, raw.after_length(b"x" * 900_000), unpacked)
    content = raw.one_list(count) + b"\x01" + raw.run(0, count)
    pages = first + raw.data_page(count, raw.PLACES, content)
    return Chunk(pages, count, kind, dictionary=len(first))


@pytest.mark.parametrize(
    "chunk",
    [list_of_one_text(), list_of_one_text(unpacked=4), list_of_one_text(kind=raw.INT32)],
    ids=["as it is", "a dictionary that says it is small", "a chunk that says it has numbers"],
)
def test_a_list_of_one_text_is_held_once(tmp_path: Path, chunk: Chunk) -> None:
    assert read(of_one_list(tmp_path, chunk)) == ["bad_text"]


def list_of_one_number(count: int, depth: int = 1) -> Chunk:
    first = raw.dictionary_page(1, bytes(8))
    content = raw.one_list(count, depth) + b"\x01" + raw.run(0, count)
    pages = first + raw.data_page(count, raw.PLACES, content)
    return Chunk(pages, count, raw.INT64, dictionary=len(first))


@pytest.mark.parametrize(
    ("schema", "count", "unpacked"),
    [
        (raw.lists(raw.INT64), 70_000_000, "1,120,0"),
        (raw.lists(raw.INT64, fields=10), 10_000_000, "1,600,0"),
        (raw.lists(raw.INT64, depth=30), 10_000_000, "1,320,0"),
    ],
    ids=["one leaf", "ten leaves", "lists in lists"],
)
def test_lists_of_all_leaves_together_are_bounded(
    tmp_path: Path, schema: raw.Schema, count: int, unpacked: str
) -> None:
    chunk = list_of_one_number(count, depth=max(1, len(schema.leaves[0]) // 2))
    path = raw.write(tmp_path / "a.parquet", schema, [chunk] * len(schema.leaves), 1)
    # leaves that share their bytes do not make more of them
    assert path.stat().st_size < 5_000
    with pytest.raises(ConfigError, match=f"the lists of row group 0 .* that unpack to {unpacked}"):
        read(path)


def test_texts_of_all_dictionaries_together_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "STEP_BYTES", 10_000)
    monkeypatch.setattr(bounds, "LISTS_BYTES", 100_000)
    texts = [[{"a": "x" * 400, "b": "y" * 400}] * 200]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": texts}), path)
    with path.open("rb") as file:
        footer = pq.read_metadata(path)
        leaves = bounds.leaves_of(footer, ["prompt"])
        way = bounds.decoding_of("a", file, footer, 0, leaves, 64)
    assert way.as_dictionary == {"prompt.list.element.b"}
    assert read(path) == texts


def test_the_largest_pages_of_all_leaves_together_are_bounded(tmp_path: Path) -> None:
    content = raw.after_length(bytes(500 * 2**20))
    packed = compressed(content)
    chunk = Chunk(raw.data_page(1, raw.PLAIN, packed, len(content)), 1, codec=raw.ZSTD)
    path = raw.write(tmp_path / "a.parquet", raw.records(10), [chunk] * 10, 1)
    with pytest.raises(
        ConfigError, match=r"largest pages of all columns of row group 0 .* 5,243,0"
    ):
        read(path)


def test_what_arrow_reads_ahead_of_all_leaves_together_is_bounded(tmp_path: Path) -> None:
    chunk = Chunk(raw.data_page(1, raw.PLAIN, raw.after_length(bytes(2**20))), 1)
    path = raw.write(tmp_path / "a.parquet", raw.records(1_000), [chunk] * 1_000, 1)
    with pytest.raises(
        ConfigError, match=r"largest pages of all columns of row group 0 .* 1,310,7"
    ):
        read(path)


def test_nulls_of_a_fixed_length_count_with_it(tmp_path: Path) -> None:
    """Arrow makes room for each, whether it is there or not."""
    pages = raw.data_page(200, raw.PLAIN, raw.after_length(raw.run(0, 200)))
    schema = raw.flat(raw.FIXED, optional=True, length=10**7)
    path = raw.write(tmp_path / "a.parquet", schema, [Chunk(pages, 200, raw.FIXED)], 200)
    with pytest.raises(ConfigError, match=r"a page of .* bytes that unpacks to 2,000,000,000"):
        read(path)
    schema = raw.flat(raw.FIXED, optional=True, length=10**6)
    raw.write(path, schema, [Chunk(pages, 200, raw.FIXED)], 200)
    assert read(path) == [None] * 200


@pytest.mark.parametrize("codec", ["zstd", "lz4_raw"])
def test_a_page_of_lengths_counts_twice(tmp_path: Path, codec: str) -> None:
    content = lengths(1, 300 * 2**20) + bytes(300 * 2**20)
    packed = compressed(content, codec)
    pages = raw.data_page(1, raw.DELTA_LENGTHS, packed, len(content))
    chunk = Chunk(pages, 1, codec={"zstd": raw.ZSTD, "lz4_raw": raw.LZ4_RAW}[codec])
    with pytest.raises(ConfigError, match=r"a page of .* bytes that unpacks to 629,14"):
        read(of_texts(tmp_path, chunk, 1))


def truths(count: int) -> Chunk:
    content = raw.one_list(count) + raw.after_length(raw.run(1, count))
    return Chunk(raw.data_page(count, raw.RLE, content), count, raw.BOOLEAN)


def test_many_small_values_are_too_large_together(tmp_path: Path) -> None:
    """In Python each takes much more than in the file."""
    assert read(of_one_list(tmp_path, truths(4_000_000), raw.BOOLEAN)) == [[True] * 4_000_000]
    assert read(of_one_list(tmp_path, truths(5_000_000), raw.BOOLEAN)) == ["bad_text"]


def test_many_small_records_are_too_large_together(tmp_path: Path) -> None:
    schema = raw.lists(raw.BOOLEAN, fields=1)
    path = tmp_path / "a.parquet"
    raw.write(path, schema, [truths(600_000)], 1)
    assert read(path) == [[{"f0": True}] * 600_000]
    raw.write(path, schema, [truths(800_000)], 1)
    assert read(path) == ["bad_text"]


@pytest.mark.parametrize(
    "make",
    [
        lambda texts: pa.ListArray.from_arrays(pa.array([0, 9], pa.int32()), texts),
        lambda texts: pa.LargeListArray.from_arrays(pa.array([0, 9], pa.int64()), texts),
        lambda texts: pa.FixedSizeListArray.from_arrays(texts, 9),
    ],
    ids=["list", "large list", "list of fixed size"],
)
def test_texts_of_a_dictionary_count_each_time_in_every_kind_of_list(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[Any], Any]
) -> None:
    monkeypatch.setattr(bounds, "LINE_BYTES", 5_000)
    column = make(pa.array(["x" * 1_000] * 9).dictionary_encode())
    assert bounds.too_large(pa.table({"a": column}), ["a"]).startswith("column `a` has 9,1")


@pytest.mark.parametrize(
    ("rows", "rows_of_file", "why"),
    [
        (2**33, 2**33, "8,589,934,592 rows, the limit is 4,294,967,296"),
        (200, 201, "201 rows, its row groups have 200"),
        (-5, -5, "-5 rows, its row groups have -5"),
    ],
)
def test_rows_that_cannot_be_are_refused_with_both_numbers(
    tmp_path: Path, rows: int, rows_of_file: int, why: str
) -> None:
    chunk = one_page(raw.data_page(200, raw.PLAIN, PLAIN_TEXTS))
    path = of_texts(tmp_path, chunk, rows, rows_of_file=rows_of_file)
    with pytest.raises(ConfigError, match=why):
        look(path, ["prompt"])


def test_a_footer_with_names_that_are_no_text_is_refused(tmp_path: Path) -> None:
    chunk = one_page(raw.data_page(200, raw.PLAIN, PLAIN_TEXTS))
    path = of_texts(tmp_path, chunk)
    path.write_bytes(path.read_bytes().replace(b"prompt", b"\xffrompt"))
    with pytest.raises(ConfigError, match="is not a Parquet file: 'utf-8' codec"):
        look(path, ["prompt"])


def test_damaged_metadata_of_a_chunk_is_an_error_and_no_crash(tmp_path: Path) -> None:
    """Asked for the metadata of this chunk, pyarrow ends the process."""
    path = of_texts(tmp_path, one_page(raw.data_page(200, raw.PLAIN, PLAIN_TEXTS), codec=99))
    with pytest.raises(InfrastructureError, match="Unsupported compression codec value: 99"):
        read(path)
