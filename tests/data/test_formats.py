"""Which files are an input, of which format, and what the names of their folders say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobrunner.config import Settings
from jobrunner.data.input.columns import strange_column
from jobrunner.data.input.inputs import open_input
from jobrunner.errors import ConfigError
from tests.data.reading import kept_of, look, rows_of, values_of, write_bytes


def jsonl(path: Path, *prompts: str) -> Path:
    return write_bytes(path, "".join(f'{{"prompt": "{p}"}}\n' for p in prompts).encode())


def parquet(path: Path, **columns: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def settings_of(folder: Path, **table: Any) -> Settings:
    tables: dict[str, Any] = {
        "input": {"path": "in", "prompt": "prompt", **table},
        "output": {"path": "run"},
        "model": {"name": "demo"},
    }
    return Settings.model_validate({**tables, "folder": folder})


class TestFormat:
    def test_folder_is_searched_for_every_known_suffix(self, tmp_path: Path) -> None:
        for name in ("a.jsonl", "b.JSONL.gz", "x/c.ndjson.zst", "x/.d.jsonl", "x/_e.jsonl"):
            jsonl(tmp_path / "in" / name, name)
        (tmp_path / "in" / "notes.txt").write_text("not data")
        assert [s.name for s in look(tmp_path / "in")] == [
            "a.jsonl",
            "b.JSONL.gz",
            "x/c.ndjson.zst",
        ]

    def test_mix_of_formats_is_refused_with_the_list(self, tmp_path: Path) -> None:
        jsonl(tmp_path / "in" / "a.jsonl", "x")
        jsonl(tmp_path / "in" / "b.jsonl", "x")
        parquet(tmp_path / "in" / "c.parquet", prompt=["x"])
        with pytest.raises(ConfigError) as caught:
            look(tmp_path / "in")
        assert "several formats: 2 jsonl (`a.jsonl`), 1 parquet (`c.parquet`)" in str(caught.value)
        assert [s.name for s in look(tmp_path / "in", format_name="parquet")] == ["c.parquet"]

    def test_named_format_reads_files_of_any_name(self, tmp_path: Path) -> None:
        path = jsonl(tmp_path / "in" / "prompts.txt", "a", "b")
        assert values_of(look(path, ["prompt"], format_name="jsonl"), "prompt") == ["a", "b"]
        with pytest.raises(ConfigError, match="is not a Parquet file") as caught:
            look(path)
        assert "`input.format`" in caught.value.hint

    def test_content_says_how_it_is_compressed_not_the_name(self, tmp_path: Path) -> None:
        path = jsonl(tmp_path / "a.jsonl.gz", "x")
        plain = tmp_path / "b.jsonl"
        plain.write_bytes(path.read_bytes())
        assert values_of(look(plain, ["prompt"]), "prompt") == ["x"]

    def test_file_url_is_a_path(self, tmp_path: Path) -> None:
        jsonl(tmp_path / "in" / "a.jsonl", "x")
        job_input = open_input(settings_of(tmp_path, path=f"file://{tmp_path}/in"))
        assert list(job_input.shards) == ["a.jsonl"]


class TestHivePartitions:
    def test_values_are_columns_text_or_integer(self, tmp_path: Path) -> None:
        for year, city in ((2023, "New%20York"), (2024, "__HIVE_DEFAULT_PARTITION__")):
            folder = tmp_path / "in" / f"year={year}" / f"city={city}"
            parquet(folder / "a.parquet", prompt=["p", "q"])
        table = kept_of(tmp_path / "in", "year", "prompt", "city")
        assert table.schema.types == [pa.int64(), pa.string(), pa.string()]
        assert table.to_pylist() == [
            {"year": 2023, "prompt": "p", "city": "New York"},
            {"year": 2023, "prompt": "q", "city": "New York"},
            {"year": 2024, "prompt": "p", "city": None},
            {"year": 2024, "prompt": "q", "city": None},
        ]
        rows = rows_of(look(tmp_path / "in", ["prompt", "year"]), "prompt", ["year"])
        assert [row.others["year"] for row in rows] == [2023, 2023, 2024, 2024]

    def test_integer_with_a_null_is_an_integer(self, tmp_path: Path) -> None:
        for part in ("1", "02", "__HIVE_DEFAULT_PARTITION__"):
            jsonl(tmp_path / "in" / f"part={part}" / "a.jsonl", "p")
        assert kept_of(tmp_path / "in", "part")["part"].to_pylist() == [2, 1, None]

    def test_one_text_makes_all_text(self, tmp_path: Path) -> None:
        for part in ("1", "x"):
            write_bytes(tmp_path / "in" / f"part={part}" / "a.csv", b"prompt\np\n")
        assert kept_of(tmp_path / "in", "part")["part"].to_pylist() == ["1", "x"]

    def test_value_of_the_folder_counts_before_that_of_the_file(self, tmp_path: Path) -> None:
        parquet(tmp_path / "in" / "n=7" / "a.parquet", prompt=["p"], n=["other"])
        shards = look(tmp_path / "in", ["n"])
        assert values_of(shards, "n") == [7]
        assert kept_of(tmp_path / "in", "n").to_pylist() == [{"n": 7}]

    @pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
    def test_rows_made_of_partitions_alone_are_counted(self, tmp_path: Path, suffix: str) -> None:
        path = tmp_path / "in" / "n=7" / f"a.{suffix}"
        if suffix == "parquet":
            parquet(path, prompt=["p"] * 300)
        else:
            jsonl(path, *["p"] * 300)
        shards = look(tmp_path / "in", ["n"])
        assert values_of(shards, "n") == [7] * 300
        assert len(kept_of(tmp_path / "in", "n")) == 300

    def test_folder_without_the_column_is_refused(self, tmp_path: Path) -> None:
        parquet(tmp_path / "in" / "n=7" / "a.parquet", prompt=["p"])
        parquet(tmp_path / "in" / "b.parquet", prompt=["p"])
        with pytest.raises(ConfigError, match="has no column `n`"):
            look(tmp_path / "in", ["n"])


class TestStrangeColumn:
    @pytest.mark.parametrize(
        ("kind", "values", "strange"),
        [
            ("text", ["x"], ""),
            ("text", [1], "column `c` of `a.parquet` is int64, not text"),
            ("text", [None], ""),
            ("messages", [[{"role": "user"}]], ""),
            ("messages", ["x"], "column `c` of `a.parquet` is string, not a list of messages"),
            ("token_ids", [[1, 2]], ""),
            ("token_ids", ["x"], "column `c` of `a.parquet` is string, not a list of integers"),
            (
                "token_ids",
                [["x"]],
                "column `c` of `a.parquet` is list<element: string>, not a list of integers",
            ),
        ],
    )
    def test_column_of_another_type_is_told(
        self, tmp_path: Path, kind: Any, values: list[Any], strange: str
    ) -> None:
        shards = look(parquet(tmp_path / "a.parquet", c=values), ["c"])
        assert strange_column(shards, "c", kind) == strange

    def test_csv_is_text_and_json_may_be_anything(self, tmp_path: Path) -> None:
        lines = look(jsonl(tmp_path / "a.jsonl", "x"), ["prompt"])
        assert strange_column(lines, "prompt", "messages") == ""
        commas = look(write_bytes(tmp_path / "a.csv", b"prompt\nx\n"), ["prompt"])
        assert strange_column(commas, "prompt", "messages") == (
            "column `prompt` of `a.csv` is string, not a list of messages"
        )


class TestOpenInput:
    def test_id_is_carried_behind_the_kept_columns_once(self, tmp_path: Path) -> None:
        parquet(tmp_path / "in" / "a.parquet", prompt=["p"], key=[1], more=["x"])
        named = open_input(settings_of(tmp_path, id="key", keep=("more",)))
        assert named.kept_schema.names == ["more", "key"]
        kept = open_input(settings_of(tmp_path, id="key", keep=("key", "more")))
        assert kept.kept_schema.names == ["key", "more"]

    @pytest.mark.parametrize("name", ["text", "samples"])
    def test_kept_column_named_like_any_result_is_refused(self, tmp_path: Path, name: str) -> None:
        parquet(tmp_path / "in" / "a.parquet", prompt=["p"], **{name: ["x"]})
        with pytest.raises(ConfigError, match=f"`{name}` has the name of a result column"):
            open_input(settings_of(tmp_path, keep=(name,)))

    def test_openai_batch_needs_its_keys_and_keeps_none(self, tmp_path: Path) -> None:
        line = b'{"custom_id": "c", "method": "POST", "url": "/v1", "body": {}}\n'
        write_bytes(tmp_path / "in" / "a.jsonl", line)
        job_input = open_input(settings_of(tmp_path, format="openai", prompt=None))
        assert job_input.kept_schema.names == []
        assert job_input.needed[:4] == ("custom_id", "method", "url", "body")

    def test_fingerprint_tells_formats_apart_but_not_how_they_were_named(
        self, tmp_path: Path
    ) -> None:
        path = write_bytes(tmp_path / "in" / "a.jsonl", b'{"prompt": "x"}\n')
        by_name = open_input(settings_of(tmp_path)).fingerprint()
        assert open_input(settings_of(tmp_path, format="jsonl")).fingerprint() == by_name
        as_csv = settings_of(
            tmp_path, path=f"in/{path.name}", format="csv", prompt='{"prompt": "x"}'
        )
        assert by_name["input.format"] == "jsonl"
        assert open_input(as_csv).fingerprint()["input.format"] == "csv"

    def test_limit_looks_at_no_file_after_it(self, tmp_path: Path) -> None:
        jsonl(tmp_path / "in" / "a.jsonl", "x", "y")
        parquet(tmp_path / "in" / "b.parquet", prompt=["x"])
        settings = settings_of(tmp_path, path="in/*", format="jsonl")
        job_input = open_input(settings.model_copy(update={"limit": 2}))
        assert [(s.name, s.rows) for s in job_input.shards.values()] == [("a.jsonl", 2)]

    @pytest.mark.parametrize("path", [".", "**/*.jsonl"])
    def test_run_directory_inside_the_input_is_refused(self, tmp_path: Path, path: str) -> None:
        jsonl(tmp_path / "a.jsonl", "x")
        with pytest.raises(ConfigError, match="results would become input"):
            open_input(settings_of(tmp_path, path=path))

    def test_a_name_is_too_long_by_what_its_own_result_file_ends_in(self, tmp_path: Path) -> None:
        line = b'{"custom_id": "c", "method": "POST", "url": "/v1", "body": {}}\n'
        longest = 255 - len(".responses.jsonl")
        settings = settings_of(tmp_path, format="openai", prompt=None)
        write_bytes(tmp_path / "in" / f"{'a' * longest}.jsonl", line)
        assert open_input(settings).shards
        write_bytes(tmp_path / "in" / f"{'b' * (longest + 1)}.jsonl", line)
        with pytest.raises(ConfigError, match="a name of over 255 bytes"):
            open_input(settings)

    def test_a_result_file_where_another_needs_a_folder_is_refused(self, tmp_path: Path) -> None:
        jsonl(tmp_path / "in" / "a.jsonl", "x")
        jsonl(tmp_path / "in" / "a.parquet" / "b.jsonl", "x")
        with pytest.raises(ConfigError, match=r"the result file of `a\.jsonl` would stand"):
            open_input(settings_of(tmp_path))
