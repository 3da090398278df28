"""Write records as files: Parquet as writers differ, JSON Lines and CSV good and broken."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.fuzzing.corpus import Corpus, surrogate
from tests.fuzzing.records import DEPTHS, Recipe, Record, spoil


def compress(content: bytes, name: str) -> bytes:
    """Compress as the name says."""
    if name.endswith(".gz"):
        half = len(content) // 2
        # two members are one file
        return gzip.compress(content[:half], 1) + gzip.compress(content[half:], 1)
    if name.endswith(".zst"):
        half = len(content) // 2
        frames = [
            pa.compress(piece, "zstd", asbytes=True) for piece in (content[:half], content[half:])
        ]
        return b"".join(frames)
    return content


# ---- JSON Lines


def json_lines(records: Sequence[Record], rng: random.Random, corpus: Corpus) -> bytes:
    """Spell records as lines; some become lines that are broken or blank."""
    broken = rng.choice((0.0, 0.02, 0.3))
    end = rng.choice((b"\n", b"\n", b"\r\n"))
    lines = [_json_line(record, rng, corpus, broken) + end for record in records]
    if rng.random() < 0.2:
        lines.insert(rng.randint(0, len(lines)), rng.choice((b"", b"  ", b"\t")) + end)
    content = b"".join(lines)
    if rng.random() < 0.2:
        content = content.removesuffix(b"\n")
    return b"\xef\xbb\xbf" + content if rng.random() < 0.1 else content


def _json_line(record: Record, rng: random.Random, corpus: Corpus, broken: float) -> bytes:
    if rng.random() < broken:
        record = spoil(record, rng, corpus)
    ascii_only = rng.random() < 0.5
    try:
        line = json.dumps(record, ensure_ascii=ascii_only).encode()
    except UnicodeEncodeError:
        line = json.dumps(record).encode()
    name = json.dumps(rng.choice(sorted(record) or ["id"])).encode()
    return _broken_line(line, name, rng, corpus) if rng.random() < broken else line


def _broken_line(line: bytes, name: bytes, rng: random.Random, corpus: Corpus) -> bytes:
    """Break a line, or give the column `name`, which is spelled as JSON, another value."""
    depth = rng.choice(DEPTHS)
    deep = b"[" * depth + b"]" * depth
    half = rng.randint(1, len(line) - 1)
    escaped = json.dumps(surrogate(corpus.drawn(rng), rng)).encode()
    return rng.choice(
        (
            line[:half],
            line + line,
            line[:half] + b"\xff\xfe" + line[half:],
            line[:half] + b"\xed\xa0\x80" + line[half:],
            line.replace(b"{", b'{"id": ' + deep + b", ", 1),
            line[:-1] + b", " + name + b": " + deep + b"}",
            line[:-1] + b", " + name + b': [{"role": "user", "content": ' + deep + b"}]}",
            line[:-1] + b", " + name + b': {"n": 1, "stop": ' + deep + b"}}",
            line[:-1] + b", " + name + b": " + json.dumps(deep.decode()).encode() + b"}",
            b'{"a": ' * depth + b"1" + b"}" * depth,
            line[:-1] + b', "id": ' + b"7" * rng.choice((20, 400, 5000)) + b"}",
            line[:-1] + b', "real kept": 1e999}',
            line[:-1] + b', "real kept": NaN}',
            line[:-1] + b', "id": ' + escaped + b"}",
            line[:-1] + b', "": "", "id": "twice"}',
            b"\0" + line,
            b"null",
            b"[1]",
            b'"text"',
            b"-0",
            b"{}",
            b"\x0c",
            b"\xc2\x85",
            b" \xe2\x80\xa8",
        )
    )


# ---- CSV


def csv_lines(records: Sequence[Record], rng: random.Random, corpus: Corpus) -> bytes:
    """Spell records under a header; some records become broken ones."""
    broken = rng.choice((0.0, 0.02, 0.2))
    names = list(records[0]) if records else ["id", "prompt"]
    sink = io.StringIO(newline="")
    end = rng.choice(("\r\n", "\n"))
    quote_all = csv.writer(sink, lineterminator=end, quoting=csv.QUOTE_ALL)
    writer = rng.choice((quote_all, csv.writer(sink, lineterminator=end)))
    writer.writerow(names)
    pieces = [_taken(sink)]
    for record in records:
        writer.writerow([_cell(record[name]) for name in names])
        piece = _taken(sink)
        pieces.append(_broken_record(piece, rng) if rng.random() < broken else piece)
    content = b"".join(pieces)
    return b"\xef\xbb\xbf" + content if rng.random() < 0.2 else content


def _taken(sink: io.StringIO) -> bytes:
    content = sink.getvalue().encode()
    sink.seek(0)
    sink.truncate()
    return content


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


def _broken_record(piece: bytes, rng: random.Random) -> bytes:
    half = rng.randint(0, len(piece) - 1)
    return rng.choice(
        (
            piece[:half] + b'"' + piece[half:],
            piece[:half] + b"\xff" + piece[half:],
            piece[:half] + b"\0" + piece[half:],
            piece[:half] + b"," + piece[half:],
            b"one field\n",
            b"\n",
            b"\r",
            b'"never closed',
            piece[:half],
            b",,,,,,,,,,,,,,,\n",
        )
    )


# ---- Parquet


def write_parquet(
    path: Path, records: Sequence[Record], recipe: Recipe, types: dict[str, Any], rng: random.Random
) -> None:
    """Write records as one of the many writers of Parquet would; `types` are those of a job."""
    names = _names(recipe)
    arrays = [_array([record[name] for record in records], types[name], rng) for name in names]
    table = pa.table(dict(zip(names, arrays, strict=True)))
    pq.write_table(
        table,
        path,
        row_group_size=rng.choice((1, 7, 100, 5000)),
        compression=rng.choice(("none", "snappy", "zstd", "gzip")),
        use_dictionary=rng.random() < 0.5,
        data_page_version=rng.choice(("1.0", "2.0")),
        data_page_size=rng.choice((64, 1024, 2**20)),
        version=rng.choice(("1.0", "2.4", "2.6")),
        write_statistics=rng.random() < 0.7,
        store_schema=rng.random() < 0.8,
        write_page_checksum=rng.random() < 0.3,
        write_page_index=rng.random() < 0.3,
    )


def _names(recipe: Recipe) -> list[str]:
    template = ("name", "number") if recipe.source == "template" else ()
    params = ("params",) if recipe.struct else recipe.params
    tools = ("tools",) if recipe.tools else ()
    return ["id", recipe.column, *template, *params, *tools, *recipe.extras]


_TEXT_TYPES = ("string", "large", "dictionary", "string", "large", "view")
_ODD_TYPES = ("null", "invalid", "int64", "binary", "list")
_PARAMETER_TYPES = {
    **dict.fromkeys("temperature top_p min_p repetition_penalty".split(), pa.float64()),
    **dict.fromkeys("top_k max_new_tokens min_new_tokens seed n".split(), pa.int64()),
    "stop": pa.list_(pa.string()),
    "stop_token_ids": pa.list_(pa.int64()),
    "ignore_eos": pa.bool_(),
}


def draw_types(recipe: Recipe, rng: random.Random) -> dict[str, Any]:
    """Choose the types of a job's columns, mostly sensible ones; of one shard they may differ."""
    odd = rng.random() < 0.12
    types: dict[str, Any] = {"id": rng.choice(_TEXT_TYPES), "name": rng.choice(_TEXT_TYPES)}
    types["number"] = rng.choice((pa.int64(), pa.float64()))
    types["tools"] = "string"
    types["params"] = rng.choice(("struct", "json", "struct"))
    types |= _PARAMETER_TYPES
    message = [("role", pa.string()), ("content", rng.choice((pa.string(), pa.large_string())))]
    of_source: dict[str, tuple[Any, ...]] = {
        "prompt": _TEXT_TYPES,
        "template": _TEXT_TYPES,
        "messages": (pa.list_(pa.struct(message)), pa.large_list(pa.struct(message))),
        "token_ids": (pa.list_(pa.int64()), pa.list_(pa.int32()), pa.large_list(pa.uint32())),
    }
    types[recipe.column] = rng.choice(_ODD_TYPES if odd else of_source[recipe.source])
    types |= {name: _EXTRA_TYPES[name.partition(" ")[0]](rng) for name in recipe.extras}
    return types


_EXTRA_TYPES: dict[str, Any] = {
    "text": lambda rng: rng.choice((*_TEXT_TYPES, "invalid", "binary")),
    "whole": lambda rng: rng.choice((pa.int64(), pa.timestamp("us", "UTC"), pa.duration("ms"))),
    "real": lambda rng: rng.choice((pa.float64(), "nan", pa.float32())),
    "flag": lambda rng: pa.bool_(),
    "list": lambda rng: rng.choice((pa.list_(pa.int64()), pa.large_list(pa.int8()))),
    "nested": lambda rng: pa.struct({"a": pa.string(), "b": pa.list_(pa.int64())}),
}


def _array(values: list[Any], wanted: Any, rng: random.Random) -> Any:
    if not isinstance(wanted, str):
        return _typed(values, wanted)
    if wanted == "struct":
        return pa.array(values, pa.struct(_PARAMETER_TYPES))
    if wanted == "json":
        texts = [None if value is None else json.dumps(value) for value in values]
        return pa.array(texts, pa.string())
    if wanted == "nan":
        return pa.array([math.nan if value is None else value for value in values], pa.float64())
    if wanted == "null":
        return pa.nulls(len(values))
    if wanted == "int64":
        return pa.array(range(len(values)), pa.int64())
    texts = [None if value is None else _cell(value) for value in values]
    if wanted == "list":
        return pa.array([None if text is None else [text] for text in texts])
    if wanted in ("binary", "invalid"):
        raw = [None if text is None else _damaged(text.encode(), rng) for text in texts]
        binary = pa.array(raw, pa.binary())
        return binary if wanted == "binary" else binary.view(pa.string())
    types = {"string": pa.string(), "large": pa.large_string(), "view": pa.string_view()}
    array = pa.array(texts, types.get(wanted, pa.string()))
    return array.dictionary_encode() if wanted == "dictionary" else array


def _typed(values: list[Any], wanted: Any) -> Any:
    if pa.types.is_timestamp(wanted) or pa.types.is_duration(wanted):
        return pa.array(values, pa.int64()).cast(wanted)
    if pa.types.is_floating(wanted) and any(isinstance(v, int) for v in values):
        values = [None if value is None else float(value) for value in values]
    if wanted == pa.float32():
        return pa.array(values, pa.float64()).cast(wanted, safe=False)
    return pa.array(values, wanted)


def _damaged(raw: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.7:
        return raw
    place = rng.randint(0, len(raw))
    return raw[:place] + rng.choice((b"\xff", b"\xed\xa0\x80", b"\xc3", b"\xf0\x9f")) + raw[place:]
