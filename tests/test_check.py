"""`cbjob check`: what is wrong with a job, its input and its rows is known before it runs."""

import json
import os
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from jobrunner.cli import cli
from jobrunner.commands import check
from jobrunner.commands.check import examine
from jobrunner.commands.check_view import as_json, draw, text_lines
from jobrunner.data.census import Census
from jobrunner.errors import ConfigError, ModelError
from jobrunner.records import Request, RowId, Sampling
from tests.world import World

PROMPTS = ["one", "two words", "one", "a rather longer prompt than the others", None, ""]


@pytest.fixture
def world(tmp_path, tiny_model):
    world = World(tmp_path, tiny_model)
    world.add_shard("a.parquet", PROMPTS[:4])
    world.add_shard("b.parquet", PROMPTS[4:])
    return world


@pytest.fixture
def no_weights(monkeypatch):
    def refuse(job):
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(check, "load", refuse)


def cbjob_check(world, *options):
    return CliRunner().invoke(cli, ["check", str(world.job_file), *options], standalone_mode=False)


def write_ids(world, name, ids, prompts=None):
    path = world.folder / "input" / name
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table({"id": ids, "prompt": prompts or ["x"] * len(ids)}), path)


def test_check_loads_the_model_and_proves_it(world):
    report = examine(world.settings('batching.kv_memory="1MiB"'))
    model = report.model
    assert model.proven
    assert model.architecture == "LlamaForCausalLM"
    assert model.max_model_len == 2048
    assert 0 <= 2**20 - model.kv_tokens * model.kv_bytes_per_token < 16 * model.kv_bytes_per_token
    assert report.exit_code == 0
    assert any("loaded and proven" in line for line in text_lines(report))


def test_check_with_rows_opens_no_weights(world, no_weights):
    report = examine(world.settings(), rows=True, load=False)
    assert not report.model.proven
    assert report.rows is not None


def test_the_estimate_without_weights_is_what_a_load_gives(world):
    settings = world.settings('batching.kv_memory="1MiB"')
    estimated, loaded = examine(settings, load=False), examine(settings)
    assert estimated.model.kv_tokens == loaded.model.kv_tokens
    assert estimated.model.weight_bytes == loaded.model.weight_bytes


def test_the_input_is_described(world):
    found = examine(world.settings(), load=False).input
    assert (found.formats, found.shards, found.rows) == (("parquet",), 2, 6)
    sizes = [os.path.getsize(path) for path in (world.folder / "input").iterdir()]
    assert found.size_bytes == sum(sizes)
    assert {column.name: column.shards_by_type for column in found.columns} == {
        "id": {"string": 2},
        "prompt": {"string": 2},
    }


def test_a_column_that_differs_between_shards_is_named(world):
    table = pa.table({"id": ["x"], "prompt": pa.array(["y"], pa.large_string()), "extra": [1]})
    pq.write_table(table, world.folder / "input" / "c.parquet")
    text = "\n".join(text_lines(examine(world.settings(), load=False)))
    assert "column prompt: differs between shards: string in 2, large_string in 1" in text
    assert "column extra: differs between shards: int64 in 1, absent from 2" in text


def test_every_row_is_counted_as_what_it_would_become(world, no_weights):
    report = examine(world.settings(), rows=True, load=False)
    rows = report.rows
    assert (rows.rows, rows.ok_rows) == (6, 4)
    assert rows.errors == {"empty_prompt": 1, "null_prompt": 1}
    assert "b.parquet" in rows.examples["null_prompt"][0]
    assert rows.repeated_rows == 1
    assert (rows.longest[0].shard, rows.longest[0].row) == ("a.parquet", 3)
    assert report.exit_code == 3


def test_rows_that_all_would_run_exit_0(world, no_weights):
    done = cbjob_check(world, "--rows", "--limit", "4")
    assert done.return_value == 0
    assert "ok: cbjob run can begin" in done.stdout


def test_json_is_one_object_on_stdout_and_nothing_else(world, no_weights):
    done = cbjob_check(world, "--rows", "--json")
    assert (done.return_value, done.stderr) == (3, "")
    said = json.loads(done.stdout)
    assert (said["ok"], said["exit_code"]) == (False, 3)
    assert said["rows"]["errors"] == {"empty_prompt": 1, "null_prompt": 1}
    assert said["rows"]["percentiles"]["max"] == max(map(int, said["rows"]["prompt_lengths"]))
    assert said["effective"]["generation.max_new_tokens"] == 12
    assert said["model"]["proven"] is False


def test_a_job_that_cannot_run_is_said_in_json_too(world):
    (world.folder / "input" / "a.parquet").write_text("no parquet")
    done = cbjob_check(world, "--json")
    assert isinstance(done.exception, ConfigError)
    said = json.loads(done.stdout)
    assert said["ok"] is False
    assert "not a Parquet file" in said["error"]


def test_a_model_that_cannot_run_here_is_refused_with_the_reason(world, tmp_path):
    folder = tmp_path / "t5"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "t5", "architectures": ["T5Model"]}')
    with pytest.raises(ModelError, match="encoder-decoder"):
        examine(world.settings(f"model.name={folder}"))


def test_case_N_a_prompt_column_of_numbers_is_said_once(world):
    pq.write_table(pa.table({"id": ["a"], "prompt": [1]}), world.folder / "input" / "a.parquet")
    report = examine(world.settings(), rows=True, load=False)
    assert [w for w in report.warnings if "int64" in w] == list(report.warnings)
    assert len(report.warnings) == 1
    assert report.rows.errors["bad_type"] == 1


def test_case_N_a_template_that_names_a_missing_column_is_refused(world):
    template = 'input.template="{{ prompt }} {{ absent }}"'
    job = world.job_file.read_text().replace('prompt = "prompt"\n', "")
    world.job_file.write_text(job)
    with pytest.raises(ConfigError, match="absent"):
        examine(world.settings(template), load=False)


def test_case_O_ids_that_are_not_unique_or_null_are_refused(world, no_weights):
    write_ids(world, "a.parquet", ["a", "b", "a", None])
    (world.folder / "input" / "b.parquet").unlink()
    done = cbjob_check(world, "--no-load", "--set", "input.id=id")
    assert done.return_value == 2
    assert 'rows 0 and 2 of `a.parquet` have the same id "a"' in done.stdout
    assert "row 3 of `a.parquet` has no id" in done.stdout
    said = json.loads(cbjob_check(world, "--no-load", "--json", "--set", "input.id=id").stdout)
    assert said["ids"]["count"] == 2


def test_unique_ids_are_fine(world):
    report = examine(world.settings("input.id=id"), load=False)
    assert report.ids.count == 0
    assert report.exit_code == 0


def test_choices_and_warnings_are_told(world):
    # what auto chose is a note, a text that ends early a warning
    settings = world.settings("generation.max_new_tokens=4000", 'model.dtype="auto"')
    report = examine(settings, load=False)
    assert any(note.startswith("dtype ") for note in report.notes)
    assert any("max_new_tokens is 4,000" in warning for warning in report.warnings)


def test_the_effective_parameters_are_printed(world):
    report = examine(world.settings("generation.top_k=7"), load=False)
    assert report.generation["top_k"] == 7
    lines = text_lines(report, columns=60)
    assert any("top_k 7" in line for line in lines)
    assert any("temperature 0" in line for line in lines)


def census_of(lengths):
    census = Census(max_new_tokens=4, max_model_len=10**6, block_size=16)
    for index, length in enumerate(lengths):
        census.add([Request(RowId("a", index), [1] * length, Sampling(4))])
    return census.report()


def test_lengths_are_drawn():
    assert draw(census_of([3, 3, 4, 8]), 22) == [
        "3  2  ████████████████",
        "4  1  ████████",
        "5  0",
        "6  0",
        "7  0",
        "8  1  ████████",
    ]


@pytest.mark.parametrize("columns", [10, 40, 100])
def test_a_drawing_keeps_to_its_width_and_shows_whatever_counts(columns):
    lines = draw(census_of([5] * 500 + [60_000]), columns)
    assert all(len(line) <= max(columns, 30) for line in lines)
    assert lines[-1].endswith("▏")
    assert len(lines) < 20


def test_json_of_a_report_is_json(world):
    report = examine(world.settings(), rows=True, load=False)
    assert json.loads(json.dumps(as_json(report)))["job"] == "job"


def test_a_share_of_memory_is_shown_as_what_it_comes_to(world):
    report = examine(world.settings("batching.kv_memory=0.9"), load=False)
    (said,) = [note for note in report.notes if note.startswith("memory for KV")]
    assert re.match(r"memory for KV: 90% of [\d,]+ MiB - others .* - weights .* = [\d,]+ MiB", said)
    assert said in "\n".join(text_lines(report))
    assert report.model.kv_tokens > 0
