"""`cbjob status`: read from the run directory alone, before, while and after a job runs."""

import json
import os
import shlex
import shutil
import time
from dataclasses import asdict

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from jobrunner.cli import cli
from jobrunner.commands.status import as_json, look, shell_line, status_command, text_lines
from jobrunner.data.claims import Identity
from jobrunner.data.results.parts import list_parts
from jobrunner.data.workers import find_workers
from jobrunner.errors import InfrastructureError
from tests.world import World

PROMPTS = [f"row {index}" for index in range(25)]


@pytest.fixture
def world(tmp_path, tiny_model):
    world = World(tmp_path, tiny_model)
    world.add_shard("a.parquet", PROMPTS)
    world.add_shard("b.parquet", [*PROMPTS[:20], None])
    return world


@pytest.fixture
def half_done(world):
    """A run that was stopped between its first shard and the end of its second."""
    world.run_and_stop(70, "checkpoint.part_rows=5", batch=4)
    assert [path.name for path in world.directory.results.iterdir()] == ["a.parquet"]
    assert list_parts(world.directory, "b.parquet")
    # the tests say themselves what a worker last said
    for said in world.directory.status.iterdir():
        said.unlink()
    return world


def identity(**changes) -> Identity:
    return Identity(**{**asdict(Identity.of_this_process("cpu")), **changes})


def claim(world, holder: Identity, age_s: float = 0.0) -> None:
    path = world.directory.claims / "devices" / holder.host / f"{holder.token}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(holder)))
    os.utime(path, (time.time() - age_s,) * 2)


def say(world, holder: Identity, age_s: float = 0.0, **numbers) -> None:
    said = {"worker": holder.worker, "host": holder.host, "pid": holder.pid, "interval_s": 10.0}
    numbers = {"output_tokens_per_s": 100.0, "eta_s": 60.0, "rows_this_run": 3, **numbers}
    world.directory.status.mkdir(parents=True, exist_ok=True)
    path = world.directory.status / f"{holder.worker}.json"
    path.write_text(json.dumps({**said, **numbers, "time": time.time() - age_s}))


def test_before_a_run_it_is_not_begun(world):
    status = look(world.settings())
    assert (status.state, status.sql, status.workers) == ("not begun", None, ())
    assert "not begun" in text_lines(status)[0]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"input shard `a`": {}}', "[" * 5000])
def test_a_damaged_record_of_the_job_is_said_in_words(half_done, content):
    half_done.directory.job_file.write_text(content)
    with pytest.raises(InfrastructureError, match=r"job\.json` is damaged"):
        look(half_done.settings())


def test_after_a_run_it_is_finished(world):
    world.run()
    status = look(world.settings())
    assert (status.state, status.rows, status.rows_done) == ("finished", 46, 46)
    assert (status.shards, status.shards_done) == (2, 2)
    assert status.tally.errors == {"null_prompt": 1}
    assert (status.partial_rows, status.partial_tokens) == (0, 0)


def test_after_a_stop_it_tells_what_is_done_and_what_is_saved(half_done):
    status = look(half_done.settings())
    assert status.state == "stopped"
    assert (status.shards, status.shards_done) == (2, 1)
    assert 25 <= status.rows_done < 46
    assert status.partial_rows > 0
    assert status.partial_tokens >= status.partial_rows
    assert any("cbjob run goes on" in line for line in text_lines(status))


def test_status_needs_neither_input_nor_model_and_writes_nothing(half_done):
    shutil.rmtree(half_done.folder / "input")
    settings = half_done.settings("model.name=/nowhere")
    before = sorted(half_done.folder.rglob("*"))
    assert look(settings).rows == 46
    assert sorted(half_done.folder.rglob("*")) == before


def read_rows(sql: str) -> list[dict]:
    duckdb = pytest.importorskip("duckdb")
    return duckdb.sql(sql).arrow().read_all().to_pylist()


def done_rows(world) -> list[tuple[str, int]]:
    """What is done, as the footers say."""
    parts = list_parts(world.directory, "b.parquet")
    rows = {row for path in parts for row in pq.read_table(path)["row"].to_pylist()}
    return [*(("a.parquet", row) for row in range(25)), *(("b.parquet", row) for row in rows)]


def test_the_query_reads_each_committed_row_once(half_done):
    rows = read_rows(look(half_done.settings()).sql)
    assert sorted((row["_result"], row["row"]) for row in rows) == sorted(done_rows(half_done))
    assert {row["id"] for row in rows if row["_result"] == "a.parquet"} >= {"a.parquet-0"}
    assert all(row["status"] in ("ok", "error") for row in rows)


def test_a_row_that_two_workers_wrote_is_read_once(half_done):
    first = list_parts(half_done.directory, "b.parquet")[0]
    shutil.copy(first, first.with_name(f"{10**19:020d}-other.parquet"))
    rows = read_rows(look(half_done.settings()).sql)
    assert sorted((row["_result"], row["row"]) for row in rows) == sorted(done_rows(half_done))


def test_the_query_still_reads_each_row_once_when_the_shard_is_finished_meanwhile(half_done):
    parts = half_done.directory.parts("b.parquet")
    sql = look(half_done.settings()).sql
    shutil.copytree(parts, half_done.folder / "kept")
    half_done.run()
    # a merge removes the parts after the result is there: the moment between the two
    shutil.copytree(half_done.folder / "kept", parts)
    rows = read_rows(sql)
    assert len({(row["_result"], row["row"]) for row in rows}) == len(rows) == 46


def test_the_query_reads_a_run_without_results_and_one_without_parts(world):
    world.run_and_stop(8, "checkpoint.part_rows=2", batch=2)
    assert not list(world.directory.results.iterdir())
    status = look(world.settings())
    assert len(read_rows(status.sql)) == status.rows_done > 0
    world.run()
    assert len(read_rows(look(world.settings()).sql)) == 46


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
def test_the_query_reads_json_lines_beside_parts(world, compression):
    output = ['output.format="jsonl"', f'output.compression="{compression}"']
    world.run_and_stop(70, "checkpoint.part_rows=5", *output, batch=4)
    status = look(world.settings(*output))
    assert (status.shards_done, status.state) == (1, "stopped")
    rows = read_rows(status.sql)
    assert len({(row["_result"], row["row"]) for row in rows}) == len(rows) == status.rows_done


def test_a_run_directory_with_quotes_and_wildcards_in_its_name_can_be_read(half_done):
    name = "it's [1] * ?"
    half_done.directory.root.rename(half_done.folder / name)
    status = look(half_done.settings(f'output.path="{name}"'))
    assert len(read_rows(status.sql)) == status.rows_done
    assert shlex.split(shell_line(status.sql)) == ["duckdb", "-c", status.sql]


def test_a_worker_that_runs_here_is_alive_however_long_it_is_silent(half_done):
    me = identity()
    claim(half_done, me, age_s=1000)
    say(half_done, me, age_s=1000)
    status = look(half_done.settings())
    [worker] = status.workers
    assert (worker.liveness, worker.fresh, status.state) == ("alive", False, "running")
    assert status.eta_s is None


@pytest.mark.parametrize(
    ("changes", "claim_age_s", "word_age_s", "liveness"),
    [
        ({"pid": 2**22 + 1}, 0, 0, "gone"),
        ({"boot": "an earlier one"}, 0, 0, "gone"),
        ({"host": "elsewhere"}, 10, 1000, "alive"),
        ({"host": "elsewhere"}, 1000, 5, "alive"),
        ({"host": "elsewhere"}, 1000, 31, "stale"),
    ],
)
def test_a_worker_is_alive_stale_or_gone(half_done, changes, claim_age_s, word_age_s, liveness):
    holder = identity(**changes)
    claim(half_done, holder, claim_age_s)
    say(half_done, holder, word_age_s)
    [worker] = look(half_done.settings()).workers
    assert worker.liveness == liveness


def test_a_worker_that_has_left_is_gone(half_done):
    say(half_done, identity(host="elsewhere"))
    [worker] = look(half_done.settings()).workers
    assert worker.liveness == "gone"


def test_a_worker_that_has_said_nothing_yet_is_shown(half_done):
    claim(half_done, identity())
    status = look(half_done.settings())
    assert status.state == "running"
    assert any("has said nothing yet" in line for line in text_lines(status))


def test_a_torn_status_file_is_no_word(half_done):
    half_done.directory.status.mkdir(exist_ok=True)
    (half_done.directory.status / "w.json").write_text('{"worker": "w", "ti')
    assert find_workers(half_done.directory, identity()) == []


def test_a_status_file_being_written_is_passed_over(half_done):
    me = identity()
    claim(half_done, me)
    say(half_done, me)
    word = half_done.directory.status / f"{me.worker}.json"
    (half_done.directory.status / f".{me.worker}.json.tmp").write_text(
        word.read_text().replace("100.0", "1.0")
    )
    assert look(half_done.settings()).output_tokens_per_s == 100


def test_two_workers_add_up_their_speeds(half_done):
    for token, eta_s in (("aa", 60.0), ("bb", 30.0)):
        holder = identity(host="elsewhere", token=token)
        claim(half_done, holder)
        say(half_done, holder, eta_s=eta_s)
    status = look(half_done.settings())
    assert status.output_tokens_per_s == 200
    assert status.eta_s == pytest.approx(20)


def test_json_is_one_object_on_stdout(half_done):
    job = str(half_done.job_file)
    done = CliRunner().invoke(cli, ["status", job, "--json"], standalone_mode=False)
    assert (done.return_value, done.stderr) == (0, "")
    said = json.loads(done.stdout)
    assert said == json.loads(json.dumps(as_json(look(half_done.settings()))))
    assert (said["state"], said["rows"]) == ("stopped", 46)


def test_watch_ends_when_the_job_is_finished(world, capsys):
    world.run()
    assert status_command(world.job_file, limit=None, overrides=(), json=False, watch=True) == 0
    assert capsys.readouterr().out.startswith("finished: ")


def test_watch_is_left_with_an_interrupt(half_done, monkeypatch, capsys):
    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    options = {"limit": None, "overrides": (), "json": True, "watch": True}
    assert status_command(half_done.job_file, **options) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "stopped"


def test_a_worker_that_lacks_memory_says_what_it_goes_on_with(half_done):
    here = Identity.of_this_process("fake")
    say(half_done, here, out_of_memory=2, token_budget=250, max_batch_size=30)
    shown = "\n".join(text_lines(look(half_done.settings())))
    assert "out of memory 2 times: now at most 250 tokens and 30 rows a step" in shown
