"""Write Parquet files as no library would: their headers and footers say what a test likes.

In thrift's compact protocol, as in https://parquet.apache.org/docs/file-format/metadata/.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BOOLEAN, INT32, INT64, BYTE_ARRAY, FIXED = 0, 1, 2, 6, 7
UNCOMPRESSED, SNAPPY, LZ4, ZSTD, LZ4_RAW = 0, 1, 5, 6, 7
PLAIN, RLE, BIT_PACKED, DELTA_LENGTHS, DELTA_TEXT, PLACES = 0, 3, 4, 6, 7, 8
_REQUIRED, _OPTIONAL, _REPEATED = 0, 1, 2
_MAGIC = b"PAR1"


@dataclass(frozen=True)
class Coded:
    """A value of thrift's: the number of its kind and its bytes."""

    kind: int
    content: bytes


def varint(number: int) -> bytes:
    if number < 128:
        return bytes([number])
    return bytes([number & 127 | 128]) + varint(number >> 7)


def zigzag(number: int) -> bytes:
    return varint(2 * number if number >= 0 else -2 * number - 1)


def boolean(value: bool) -> Coded:
    return Coded(1 if value else 2, b"")


def i32(number: int) -> Coded:
    return Coded(5, zigzag(number))


def i64(number: int) -> Coded:
    return Coded(6, zigzag(number))


def binary(content: str | bytes) -> Coded:
    content = content.encode() if isinstance(content, str) else content
    return Coded(8, varint(len(content)) + content)


def several(items: Sequence[Coded]) -> Coded:
    kind = items[0].kind
    content = b"".join(item.content for item in items)
    return Coded(9, bytes([0xF0 | kind]) + varint(len(items)) + content)


def struct(*fields: tuple[int, Coded]) -> Coded:
    """Fields in the order given, each with its whole number."""
    coded = [bytes([value.kind]) + zigzag(number) + value.content for number, value in fields]
    return Coded(12, b"".join(coded) + b"\x00")


def page(
    kind: int,
    own: tuple[int, Coded],
    content: bytes,
    unpacked: int | None = None,
    in_file: int | None = None,
    more: Sequence[tuple[int, Coded]] = (),
) -> bytes:
    """A page; its sizes are those of its content where nothing else is said."""
    unpacked = len(content) if unpacked is None else unpacked
    in_file = len(content) if in_file is None else in_file
    header = struct((1, i32(kind)), (2, i32(unpacked)), (3, i32(in_file)), own, *more)
    return header.content + content


def data_page(
    values: int,
    encoding: int,
    content: bytes,
    unpacked: int | None = None,
    in_file: int | None = None,
    levels: int = RLE,
    more: Sequence[tuple[int, Coded]] = (),
) -> bytes:
    own = struct((1, i32(values)), (2, i32(encoding)), (3, i32(levels)), (4, i32(levels)))
    return page(0, (5, own), content, unpacked, in_file, more)


def data_page_v2(
    values: int,
    encoding: int,
    content: bytes,
    unpacked: int | None = None,
    levels: tuple[int, int] = (0, 0),
    compressed: bool = True,
) -> bytes:
    """`levels` are the bytes of the definition and of the repetition levels."""
    own = struct(
        (1, i32(values)),
        (2, i32(0)),
        (3, i32(values)),
        (4, i32(encoding)),
        (5, i32(levels[0])),
        (6, i32(levels[1])),
        (7, boolean(compressed)),
    )
    return page(3, (8, own), content, unpacked)


def dictionary_page(values: int, content: bytes, unpacked: int | None = None) -> bytes:
    return page(2, (7, struct((1, i32(values)), (2, i32(PLAIN)))), content, unpacked)


def run(value: int, count: int, most: int = 1) -> bytes:
    """One value again and again, in numbers of as many bits as the largest needs."""
    return varint(2 * count) + value.to_bytes(-(-most.bit_length() // 8), "little")


def after_length(content: bytes) -> bytes:
    return len(content).to_bytes(4, "little") + content


def one_list(count: int, depth: int = 1) -> bytes:
    """The levels of one row that is a list of so many values, in lists of one list each."""
    repetition = run(0, 1, depth) + run(depth, count - 1, depth)
    return after_length(repetition) + after_length(run(depth, count, depth))


@dataclass(frozen=True)
class Schema:
    """The elements below the root, and the path of each leaf."""

    elements: Sequence[Coded]
    leaves: Sequence[Sequence[str]]


def _leaf(name: str, repetition: int, kind: int, length: int = 0) -> Coded:
    fields = [(1, i32(kind)), *([(2, i32(length))] if length else [])]
    # texts are UTF-8
    annotation = [(6, i32(0))] if kind == BYTE_ARRAY else []
    return struct(*fields, (3, i32(repetition)), (4, binary(name)), *annotation)


def _group(name: str, repetition: int, children: int, is_list: bool = False) -> Coded:
    annotation = [(6, i32(3))] if is_list else []
    return struct((3, i32(repetition)), (4, binary(name)), (5, i32(children)), *annotation)


def flat(kind: int = BYTE_ARRAY, optional: bool = False, length: int = 0) -> Schema:
    """One column `prompt`."""
    repetition = _OPTIONAL if optional else _REQUIRED
    return Schema([_leaf("prompt", repetition, kind, length)], [["prompt"]])


def records(leaves: int) -> Schema:
    """A column `prompt` of records of texts."""
    names = [f"f{n}" for n in range(leaves)]
    fields = [_leaf(name, _REQUIRED, BYTE_ARRAY) for name in names]
    return Schema(
        [_group("prompt", _REQUIRED, leaves), *fields], [["prompt", name] for name in names]
    )


def lists(kind: int = BYTE_ARRAY, depth: int = 1, fields: int = 0) -> Schema:
    """A column `prompt` of lists in lists of values, or of records of so many."""
    elements, path = [], []
    for name in ["prompt", *["element"] * (depth - 1)]:
        elements += [_group(name, _REQUIRED, 1, is_list=True), _group("list", _REPEATED, 1)]
        path += [name, "list"]
    path.append("element")
    if not fields:
        return Schema([*elements, _leaf("element", _REQUIRED, kind)], [path])
    names = [f"f{n}" for n in range(fields)]
    elements.append(_group("element", _REQUIRED, fields))
    return Schema(
        [*elements, *(_leaf(name, _REQUIRED, kind) for name in names)],
        [[*path, name] for name in names],
    )


@dataclass(frozen=True)
class Chunk:
    """A column chunk: its pages, and what the footer says of them.

    `dictionary` is how many bytes of the pages the dictionary page has.
    """

    pages: bytes
    values: int
    kind: int = BYTE_ARRAY
    codec: int = UNCOMPRESSED
    dictionary: int = 0
    size: int | None = None


def write(
    path: Path,
    schema: Schema,
    chunks: Sequence[Chunk],
    rows: int,
    rows_of_file: int | None = None,
    writer: str | bytes = "",
) -> Path:
    """Write a file of one row group. Chunks that are one object share their place."""
    body, metadata = bytearray(_MAGIC), []
    places: dict[int, int] = {}
    for chunk, leaf in zip(chunks, schema.leaves, strict=True):
        if id(chunk) not in places:
            places[id(chunk)] = len(body)
            body += chunk.pages
        metadata.append(_column(chunk, leaf, places[id(chunk)]))
    group = struct((1, several(metadata)), (2, i64(0)), (3, i64(rows)))
    root = struct((4, binary("schema")), (5, i32(1)))
    footer = struct(
        (1, i32(2)),
        (2, several([root, *schema.elements])),
        (3, i64(rows if rows_of_file is None else rows_of_file)),
        (4, several([group])),
        *([(6, binary(writer))] if writer else []),
    ).content
    path.write_bytes(bytes(body) + footer + len(footer).to_bytes(4, "little") + _MAGIC)
    return path


def _column(chunk: Chunk, leaf: Sequence[str], place: int) -> Coded:
    size = len(chunk.pages) if chunk.size is None else chunk.size
    return struct(
        (2, i64(0)),
        (
            3,
            struct(
                (1, i32(chunk.kind)),
                (2, several([i32(PLAIN)])),
                (3, several([binary(name) for name in leaf])),
                (4, i32(chunk.codec)),
                (5, i64(chunk.values)),
                (6, i64(size)),
                (7, i64(size)),
                (9, i64(place + chunk.dictionary)),
                *([(11, i64(place))] if chunk.dictionary else []),
            ),
        ),
    )
