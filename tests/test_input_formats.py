"""One job over the same rows in every format: equal answers, kept columns and a clean verify."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobrunner.errors import ExitCode
from tests.world import World

ROWS = [
    {"id": f"i{index}", "prompt": f'prompt {index}\n"quoted", {"x" * (index % 9)}'}
    for index in range(40)
]


@pytest.fixture
def world(tmp_path: Path, tiny_model: Path) -> World:
    return World(tmp_path, tiny_model)


def lines() -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


def commas() -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, ["id", "prompt"])
    writer.writeheader()
    writer.writerows(ROWS)
    return text.getvalue().encode()


def as_jsonl(folder: Path) -> str:
    (folder / "a.jsonl").write_bytes(lines())
    return 'path = "a.jsonl"'


def as_gzip(folder: Path) -> str:
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines()))
    return 'path = "a.jsonl.gz"'


def as_csv(folder: Path) -> str:
    (folder / "a.csv.zst").write_bytes(pa.Codec("zstd").compress(commas(), asbytes=True))
    return 'path = "a.csv.zst"'


def as_partitions(folder: Path) -> str:
    for name, rows in (("a", ROWS[:15]), ("b", ROWS[15:])):
        path = folder / "in" / f"part={name}" / "0.parquet"
        path.parent.mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows), path)
    return 'path = "in"'


def as_objects(folder: Path) -> str:
    fsspec.filesystem("memory").pipe("/formats/a.jsonl", lines())
    return 'path = "memory://formats"'


def as_dataset(folder: Path) -> str:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).save_to_disk(folder / "data")
    return 'dataset = "data"'


def as_stream(folder: Path) -> str:
    pytest.importorskip("datasets")
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_bytes(lines())
    return 'dataset = "data"\nstreaming = true'


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> list[dict[str, Any]]:
    """What the rows become from one Parquet file."""
    world = World(tmp_path_factory.mktemp("parquet"), tiny_model)
    (world.folder / "input").mkdir()
    pq.write_table(pa.Table.from_pylist(ROWS), world.folder / "input" / "a.parquet")
    assert world.run().exit_code == ExitCode.OK
    return answers(world)


def answers(world: World) -> list[dict[str, Any]]:
    """The rows of all results, without their number in the shard."""
    rows = [row for shard in world.results().values() for row in shard]
    return [{name: value for name, value in row.items() if name != "row"} for row in rows]


@pytest.mark.parametrize(
    "write", [as_jsonl, as_gzip, as_csv, as_partitions, as_objects, as_dataset, as_stream]
)
def test_rows_are_answered_alike_stopped_and_resumed(
    world: World, write: Callable[[Path], str], expected: list[dict[str, Any]]
) -> None:
    job = world.job_file.read_text().replace('path = "input"', write(world.folder), 1)
    world.job_file.write_text(job)
    assert world.run_and_stop(after_steps=6).exit_code == ExitCode.RUN_AGAIN
    assert world.run().exit_code == ExitCode.OK
    assert answers(world) == expected
    assert world.problems() == []


def test_bad_lines_and_mixed_kept_values_are_explained_and_verify(world: World) -> None:
    good = [{"id": 1, "prompt": "a"}, {"id": [2], "prompt": "b"}, {"prompt": None}]
    text = b"".join(json.dumps(row).encode() + b"\n" for row in good)
    (world.folder / "a.jsonl").write_bytes(text + b'[]\n{"prompt": "\xff"}\n')
    summary = world.run("input.path=a.jsonl")
    assert summary.exit_code == ExitCode.ROW_ERRORS
    rows = world.results()["a.parquet"]
    assert [row["id"] for row in rows] == ["1", "[2]", None, None, None]
    kinds = [None, None, "null_prompt", "bad_type", "bad_text"]
    assert [row["error_kind"] for row in rows] == kinds
    assert world.problems("input.path=a.jsonl") == []
