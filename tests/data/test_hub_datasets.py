"""`input.dataset`: from a stand-in hub, from a folder, saved to disk, and streamed."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobrunner.config import Settings
from jobrunner.data.input import hub as hub_module
from jobrunner.data.input.inputs import Input, open_input
from jobrunner.data.input.shards import check_unchanged
from jobrunner.data.input.sources import Reader, read_columns
from jobrunner.errors import ConfigError, InfrastructureError
from jobrunner.records import Span
from tests.data.dataset_hub import dataset_hub
from tests.data.reading import rows_of

datasets = pytest.importorskip("datasets")

# opens the input of a job as a process of its own: the hub's client reads its environment once
OPEN = """
import json, sys
from pathlib import Path
from jobrunner.config import Settings
from jobrunner.data.input.inputs import open_input
from jobrunner.errors import JobError
from tests.data.reading import rows_of

table = json.loads(sys.argv[2])
settings = Settings.model_validate({
    "input": {"prompt": "prompt", **table}, "output": {"path": "run"}, "model": {"name": "demo"},
    "folder": Path(sys.argv[1]),
})
try:
    found = open_input(settings)
    rows = rows_of(list(found.shards.values()), "prompt")
    outcome = [[*row.id, row.value] for row in rows]
except JobError as error:
    outcome = {"error": type(error).__name__, "message": str(error)}
print(json.dumps(outcome))
"""


def records(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [
        {"id": index, "prompt": f"prompt {index}", "turns": [{"role": "user", "content": "ü"}]}
        for index in range(start, start + count)
    ]


def parquet_bytes(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file.getvalue()


@pytest.fixture
def settings_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")

    def make(limit: int | None = None, **table: Any) -> Settings:
        tables = {
            "input": {"dataset": "data", "prompt": "prompt", **table},
            "output": {"path": "run"},
            "model": {"name": "demo"},
        }
        return Settings.model_validate({**tables, "folder": tmp_path, "limit": limit})

    return make


def prompts_of(job_input: Input) -> list[Any]:
    return [row.value for row in rows_of(list(job_input.shards.values()), "prompt")]


def kept_of(job_input: Input) -> pa.Table:
    schema = job_input.kept_schema
    shards = job_input.shards.values()
    return pa.Table.from_batches([b for s in shards for b in read_columns(s, schema)], schema)


class TestHub:
    def from_hub(self, folder: Path, **table: Any) -> Any:
        files = {
            "README.md": b"# data\n",
            "data/train-00000-of-00002.parquet": parquet_bytes(records(3)),
            "data/train-00001-of-00002.parquet": parquet_bytes(records(2, 3)),
            "data/test-00000-of-00001.parquet": parquet_bytes(records(1, 5)),
        }
        with dataset_hub({"org/data": files}) as endpoint:
            said = subprocess.run(
                [sys.executable, "-c", OPEN, str(folder), json.dumps(table)],
                env=os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "hf")},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
        return json.loads(said.stdout)

    def test_split_of_a_hub_dataset_is_one_shard_in_row_order(self, tmp_path: Path) -> None:
        found = self.from_hub(tmp_path, dataset="org/data")
        assert found == [["train", index, f"prompt {index}"] for index in range(5)]

    def test_streamed_hub_dataset_is_copied_into_the_run_directory(self, tmp_path: Path) -> None:
        found = self.from_hub(tmp_path, dataset="org/data", split="test", streaming=True)
        assert found == [["test-00000.parquet", 0, "prompt 5"]]
        (copy,) = (tmp_path / "run" / ".cbjob" / "input").rglob("*.parquet")
        assert copy.name == "test-00000.parquet"

    def test_unknown_dataset_names_folder_and_id(self, tmp_path: Path) -> None:
        found = self.from_hub(tmp_path, dataset="org/absent")
        assert found == {
            "error": "ConfigError",
            "message": f"`input.dataset` is `org/absent`, but there is no folder "
            f"`{tmp_path}/org/absent` and no such hub dataset",
        }

    def test_unknown_split_is_refused(self, tmp_path: Path) -> None:
        found = self.from_hub(tmp_path, dataset="org/data", split="dev")
        assert found["error"] == "ConfigError"
        assert 'Unknown split "dev"' in found["message"]


class TestSavedToDisk:
    @pytest.fixture
    def saved(self, tmp_path: Path) -> Path:
        rows = datasets.Dataset.from_list(records(700))
        # an order of its own, not that of the file
        rows.select(range(699, -1, -1)).save_to_disk(tmp_path / "data")
        return tmp_path / "data"

    def test_rows_come_in_the_order_of_the_dataset(self, saved: Path, settings_of: Any) -> None:
        job_input = open_input(settings_of(keep=("turns", "id")))
        assert prompts_of(job_input) == [f"prompt {index}" for index in range(699, -1, -1)]
        kept = kept_of(job_input)
        assert kept["id"].to_pylist() == list(range(699, -1, -1))
        assert kept["turns"].to_pylist() == [[{"role": "user", "content": "ü"}]] * 700

    def test_any_span_is_read_at_once(self, saved: Path, settings_of: Any) -> None:
        (shard,) = open_input(settings_of()).shards.values()
        with Reader([shard], "prompt", ["id"]) as reader:
            for start in (500, 3):
                batches = list(reader.read(Span("train", start, start + 100), skip={start}))
                assert all(0 < len(batch) <= 64 for batch in batches)
                ids = [row.others["id"] for batch in batches for row in batch]
                assert ids == [699 - row for row in range(start + 1, start + 100)]

    def test_limit_makes_the_first_rows_the_input(self, saved: Path, settings_of: Any) -> None:
        job_input = open_input(settings_of(limit=3, keep=("id",)))
        assert prompts_of(job_input) == ["prompt 699", "prompt 698", "prompt 697"]
        assert len(kept_of(job_input)) == 3

    def test_case_C_fingerprint_is_of_the_wanted_values(
        self, saved: Path, settings_of: Any, tmp_path: Path
    ) -> None:
        before = open_input(settings_of()).fingerprint()
        again = datasets.load_from_disk(str(saved)).flatten_indices()
        again.add_column("new", [0] * 700).save_to_disk(tmp_path / "copy")
        copy = open_input(settings_of(dataset="copy")).fingerprint()
        assert copy["input shard `train`"] == before["input shard `train`"]
        assert copy["input.dataset"] != before["input.dataset"]
        datasets.Dataset.from_list(records(700)).save_to_disk(tmp_path / "other")
        other = open_input(settings_of(dataset="other")).fingerprint()
        assert other["input shard `train`"] != before["input shard `train`"]

    def test_touched_files_are_unchanged(self, saved: Path, settings_of: Any) -> None:
        job_input = open_input(settings_of())
        (shard,) = job_input.shards.values()
        for path in saved.iterdir():
            os.utime(path, (1, 1))
        check_unchanged(shard)

    def test_files_that_are_gone_are_an_infrastructure_fault(
        self, saved: Path, settings_of: Any
    ) -> None:
        job_input = open_input(settings_of())
        (shard,) = job_input.shards.values()
        for path in saved.iterdir():
            path.unlink()
        with pytest.raises(InfrastructureError):
            check_unchanged(shard)

    def test_a_failure_without_words_is_named(
        self, saved: Path, settings_of: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> None:
            raise TimeoutError

        monkeypatch.setattr(hub_module, "_saved", fail)
        with pytest.raises(InfrastructureError, match="TimeoutError"):
            open_input(settings_of())

    def test_unknown_column_is_refused(self, saved: Path, settings_of: Any) -> None:
        with pytest.raises(ConfigError, match="`train` has no column `promt`"):
            open_input(settings_of(prompt="promt"))

    def test_splits_are_told_apart(self, tmp_path: Path, settings_of: Any) -> None:
        splits = {
            "train": datasets.Dataset.from_list(records(2)),
            "test": datasets.Dataset.from_list(records(1, 9)),
        }
        datasets.DatasetDict(splits).save_to_disk(tmp_path / "data")
        job_input = open_input(settings_of(split="test"))
        assert list(job_input.shards) == ["test"]
        assert prompts_of(job_input) == ["prompt 9"]
        with pytest.raises(ConfigError, match="has no split `dev`") as caught:
            open_input(settings_of(split="dev"))
        assert caught.value.hint == "set `input.split`: its splits are `train`, `test`"


class TestFolder:
    def test_folder_of_files_is_loaded(self, tmp_path: Path, settings_of: Any) -> None:
        (tmp_path / "data").mkdir()
        lines = "".join(json.dumps(record) + "\n" for record in records(3))
        (tmp_path / "data" / "a.jsonl").write_text(lines)
        assert prompts_of(open_input(settings_of())) == ["prompt 0", "prompt 1", "prompt 2"]

    @pytest.mark.parametrize("name", ["./absent", "a/b/c", "s p"])
    def test_name_that_is_neither_folder_nor_id_is_refused(
        self, settings_of: Any, name: str
    ) -> None:
        with pytest.raises(ConfigError, match="no such hub dataset"):
            open_input(settings_of(dataset=name))

    def test_code_of_a_dataset_is_not_run(self, tmp_path: Path, settings_of: Any) -> None:
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "data.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
        with pytest.raises(ConfigError):
            open_input(settings_of())
        assert not (tmp_path / "ran").exists()


class TestStreamed:
    @pytest.fixture
    def data(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(hub_module, "_FETCH_ROWS", 10)
        monkeypatch.setattr(hub_module, "_FILE_ROWS", 30)
        (tmp_path / "data").mkdir()
        pq.write_table(pa.Table.from_pylist(records(95)), tmp_path / "data" / "train.parquet")
        return tmp_path / "data"

    def test_rows_are_copied_once_and_read_from_the_copy(
        self, data: Path, settings_of: Any, tmp_path: Path
    ) -> None:
        first = open_input(settings_of(streaming=True, keep=("turns", "id")))
        assert {name: shard.rows for name, shard in first.shards.items()} == {
            "train-00000.parquet": 30,
            "train-00001.parquet": 30,
            "train-00002.parquet": 30,
            "train-00003.parquet": 5,
        }
        (data / "train.parquet").unlink()
        again = open_input(settings_of(streaming=True, keep=("turns", "id")))
        assert prompts_of(again) == [f"prompt {index}" for index in range(95)]
        assert kept_of(again)["id"].to_pylist() == list(range(95))
        assert again.fingerprint() == first.fingerprint()

    def test_limit_copies_no_more_than_it_needs(self, data: Path, settings_of: Any) -> None:
        job_input = open_input(settings_of(limit=12, streaming=True))
        assert [shard.content.rows for shard in job_input.shards.values()] == [12]

    def test_failed_copy_leaves_nothing_and_a_killed_one_is_begun_again(
        self,
        data: Path,
        settings_of: Any,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        cache = tmp_path / "run" / ".cbjob" / "input"

        def broken(*_: Any) -> Iterator[pa.Table]:
            yield pa.Table.from_pylist(records(40))
            raise OSError("the network is gone")

        with monkeypatch.context() as patch:
            patch.setattr(hub_module, "_stream", broken)
            with pytest.raises(InfrastructureError, match="the network is gone"):
                open_input(settings_of(streaming=True))
        assert list(cache.iterdir()) == []
        gone = subprocess.Popen(["true"])
        gone.wait()
        half = cache / f"key.{os.uname().nodename}.{gone.pid}"
        half.mkdir()
        (half / "train-00000.parquet").touch()
        assert len(prompts_of(open_input(settings_of(streaming=True)))) == 95
        assert not half.exists()

    def test_copy_of_a_faster_worker_is_taken(
        self,
        data: Path,
        settings_of: Any,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        write = hub_module._write_files

        def slower(*arguments: Any) -> None:
            with monkeypatch.context() as patch:
                patch.setattr(hub_module, "_write_files", write)
                patch.setattr(os, "getpid", lambda: 1)
                open_input(settings_of(streaming=True))
            write(*arguments)

        monkeypatch.setattr(hub_module, "_write_files", slower)
        assert len(prompts_of(open_input(settings_of(streaming=True)))) == 95

    def test_split_without_rows_is_refused(
        self, data: Path, settings_of: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(hub_module, "_stream", lambda *_: iter(()))
        with pytest.raises(ConfigError, match="split `train` has no rows"):
            open_input(settings_of(streaming=True))
