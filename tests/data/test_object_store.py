"""Inputs in object stores: fsspec's store in memory, and a real S3 server on loopback."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobrunner.data.input.columns import check_columns
from jobrunner.data.input.files import reading
from jobrunner.data.input.formats.content import Wanted
from jobrunner.data.input.shards import (
    Shard,
    check_unchanged,
    cut_spans,
    find_shards,
    shard_fingerprint,
)
from jobrunner.data.input.sources import Reader, read_columns
from jobrunner.errors import ConfigError, InfrastructureError
from jobrunner.records import Span
from tests.data.reading import write_bytes
from tests.object_store import s3_server

WANTED = Wanted(("prompt",), ("id",))


@pytest.fixture
def memory() -> Iterator[Any]:
    store = fsspec.filesystem("memory")
    store.store.clear()
    yield store
    store.store.clear()
    store.pseudo_dirs[:] = [""]


def find(url: str, format_name: str = "auto") -> list[Shard]:
    return find_shards(url, Path("/nowhere"), format_name, WANTED)


def everything(shards: list[Shard]) -> list[tuple[str, int, Any, Any]]:
    """Shard, row, prompt and kept id of every row."""
    schema = check_columns(shards, WANTED)
    ids = {
        s.name: [v for b in read_columns(s, schema) for v in b["id"].to_pylist()] for s in shards
    }
    with Reader(shards, "prompt") as reader:
        rows = [r for span in cut_spans(shards) for batch in reader.read(span) for r in batch]
    return [(*row.id, row.value, ids[row.id.shard][row.id.index]) for row in rows]


def write_inputs(folder: Path) -> None:
    """The same five rows in every format, in two files each."""
    rows = [{"id": f"i{index}", "prompt": f"prompt {index}"} for index in range(5)]
    for start, stop, part in ((0, 3, "a"), (3, 5, "year=2024/b")):
        some = rows[start:stop]
        lines = "".join(json.dumps(row) + "\n" for row in some).encode()
        commas = "".join(f"{row['id']},{row['prompt']}\n" for row in some)
        write_bytes(folder / "jsonl" / f"{part}.jsonl", lines)
        write_bytes(folder / "zst" / f"{part}.jsonl.zst", lines)
        write_bytes(folder / "csv" / f"{part}.csv", f"id,prompt\n{commas}".encode())
        path = folder / "parquet" / f"{part}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(some), path, row_group_size=2)


FORMATS = ("parquet", "jsonl", "zst", "csv")


def same_as_on_disk(folder: Path, url: str) -> None:
    for name in FORMATS:
        remote, local = find(f"{url}/{name}"), find(str(folder / name))
        assert everything(remote) == everything(local)
        assert len(everything(remote)) == 5
        assert [shard_fingerprint(s) for s in remote] == [shard_fingerprint(s) for s in local]


class TestInMemory:
    def test_folders_read_as_on_a_disk(self, memory: Any, tmp_path: Path) -> None:
        write_inputs(tmp_path)
        memory.put(str(tmp_path), "/bucket", recursive=True)
        same_as_on_disk(tmp_path, "memory://bucket")

    def test_url_that_a_store_refuses_is_said_in_words(
        self, memory: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object, **__: object) -> None:
            # what s3fs says of `s3://`
            raise ValueError("Cannot traverse all of S3")

        monkeypatch.setattr(type(memory), "info", refuse)
        with pytest.raises(ConfigError, match="`memory://` cannot be read: Cannot traverse"):
            find("memory://")

    def test_names_of_a_folder_a_glob_and_a_file(self, memory: Any) -> None:
        for name in ("a.jsonl", "x/b.jsonl", "x/_tmp/c.jsonl", "x/notes.txt", ".hidden.jsonl"):
            memory.pipe(f"/bucket/in/{name}", b'{"prompt": "p", "id": 1}\n')
        assert [s.name for s in find("memory://bucket/in")] == ["a.jsonl", "x/b.jsonl"]
        assert [s.name for s in find("memory://bucket/in/*/*.jsonl")] == ["x/b.jsonl"]
        assert [s.name for s in find("memory://bucket/**/*.jsonl")] == [
            "in/a.jsonl",
            "in/x/b.jsonl",
        ]
        assert [s.name for s in find("memory://bucket/in/x/notes.txt", "jsonl")] == ["notes.txt"]

    def test_partitions_are_columns(self, memory: Any) -> None:
        memory.pipe("/bucket/year=2024/a.jsonl", b'{"prompt": "p", "id": 1}\n')
        (shard,) = find("memory://bucket")
        assert shard.partition == {"year": 2024}

    @pytest.mark.parametrize("path", ["nothing", "nothing/*.jsonl", "other"])
    def test_nothing_found_is_refused(self, memory: Any, path: str) -> None:
        memory.pipe("/bucket/other/a.txt", b"")
        with pytest.raises(ConfigError, match=f"memory://bucket/{path}".replace("*", r"\*")):
            find(f"memory://bucket/{path}")

    def test_name_that_no_result_file_can_have_is_refused(self, memory: Any) -> None:
        memory.store["/bucket/a//b.jsonl"] = memory.open("/bucket/x.jsonl", "wb")
        with pytest.raises(ConfigError, match="cannot be that of a result file"):
            find("memory://bucket")

    def test_object_that_changed_is_noticed(self, memory: Any) -> None:
        memory.pipe("/bucket/a.jsonl", b'{"prompt": "p", "id": 1}\n')
        (shard,) = find("memory://bucket")
        memory.pipe("/bucket/a.jsonl", b'{"prompt": "p", "id": 1}\n')
        check_unchanged(shard)
        memory.pipe("/bucket/a.jsonl", b'{"prompt": "q", "id": 1}\n')
        with pytest.raises(InfrastructureError, match=r"`memory://.*a\.jsonl` changed"):
            check_unchanged(shard)

    def test_object_that_is_gone_is_an_infrastructure_fault(self, memory: Any) -> None:
        memory.pipe("/bucket/a.jsonl", b'{"prompt": "p", "id": 1}\n')
        (shard,) = find("memory://bucket")
        memory.rm("/bucket/a.jsonl")
        with Reader([shard], "prompt") as reader, pytest.raises(InfrastructureError):
            list(reader.read(Span("a.jsonl", 0, 1)))

    def test_a_fault_without_words_is_named(self) -> None:
        with (
            pytest.raises(InfrastructureError, match="cannot read `a`: EOFError"),
            reading("a"),
        ):
            raise EOFError

    def test_unknown_kind_of_store_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="Protocol not known: s3x"):
            find("s3x://bucket/in")

    def test_store_without_its_package_says_what_to_install(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def missing(url: str) -> None:
            raise ImportError("Install s3fs to access S3")

        monkeypatch.setattr("fsspec.core.url_to_fs", missing)
        with pytest.raises(ConfigError, match="Install s3fs to access S3") as caught:
            find("s3://bucket/in")
        assert caught.value.hint == "pip install 'jobrunner[s3]'"


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A bucket on a real server, for which fsspec has the keys."""
    with s3_server(tmp_path_factory.mktemp("weed")) as store:
        yield store


class TestS3:
    def test_folders_read_as_on_a_disk(self, s3: Any, tmp_path: Path) -> None:
        write_inputs(tmp_path)
        for path in tmp_path.rglob("*.*"):
            if path.is_file():
                s3.put_file(str(path), f"bucket/same/{path.relative_to(tmp_path)}")
        same_as_on_disk(tmp_path, "s3://bucket/same")

    def test_globs_and_single_objects(self, s3: Any) -> None:
        for name in ("a.jsonl", "x/b.jsonl", "x/c.txt"):
            s3.pipe(f"bucket/in/{name}", b'{"prompt": "p", "id": 1}\n')
        assert [s.name for s in find("s3://bucket/in/*/*.jsonl")] == ["x/b.jsonl"]
        assert [s.name for s in find("s3://bucket/in/x/c.txt", "jsonl")] == ["c.txt"]

    def test_object_written_again_is_noticed(self, s3: Any) -> None:
        s3.pipe("bucket/change/a.jsonl", b'{"prompt": "p", "id": 1}\n')
        (shard,) = find("s3://bucket/change")
        s3.pipe("bucket/change/a.jsonl", b'{"prompt": "q", "id": 1}\n')
        with pytest.raises(InfrastructureError, match=r"`s3://bucket/change/a\.jsonl` changed"):
            check_unchanged(shard)

    def test_bucket_that_does_not_exist_is_refused(self, s3: Any) -> None:
        with pytest.raises(ConfigError, match="does not exist"):
            find("s3://nobucket/in")

    def test_huge_row_group_is_streamed(self, s3: Any, tmp_path: Path) -> None:
        texts = [os.urandom(100).hex() for _ in range(20_000)]
        table = pa.table({"prompt": texts, "id": range(20_000)})
        pq.write_table(table, tmp_path / "a.parquet", use_dictionary=False, compression="none")
        s3.put_file(str(tmp_path / "a.parquet"), "bucket/big/a.parquet")
        shards = find("s3://bucket/big/a.parquet")
        assert [row[2] for row in everything(shards)] == texts

    @pytest.mark.parametrize(
        "options",
        [
            {"key": "wrong", "secret": "wrong"},
            {"client_kwargs": {"endpoint_url": "http://127.0.0.1:9"}},
        ],
        ids=["wrong key", "no server"],
    )
    def test_store_that_does_not_answer_is_an_infrastructure_fault(
        self, s3: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
    ) -> None:
        known = fsspec.config.conf["s3"]
        quick = {"config_kwargs": {"connect_timeout": 1, "retries": {"max_attempts": 1}}}
        monkeypatch.setitem(fsspec.config.conf, "s3", {**known, **quick, **options})
        with pytest.raises(InfrastructureError, match="cannot read `s3://bucket/in`"):
            find("s3://bucket/in")
