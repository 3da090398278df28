"""Whole jobs with a fake model: every row once, whatever happens."""

import errno
import itertools
import json
import logging
import os
import re
import shutil
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobrunner.data import layout
from jobrunner.data.claims import Claims, Identity, device_name
from jobrunner.data.input import sources
from jobrunner.data.progress import Progress
from jobrunner.engine.policies import Static
from jobrunner.errors import (
    ConfigError,
    DeviceBusyError,
    ExitCode,
    InfrastructureError,
    MismatchError,
)
from jobrunner.job import run
from jobrunner.stop import Stop
from tests.world import World, fake_engine, kill

SHARDS = {"a.parquet": 24, "b/c.parquet": 17, "d.parquet": 9}


@pytest.fixture
def world(tmp_path, tiny_model):
    return World(tmp_path, tiny_model)


def add_shards(world):
    """Three shards of prompts that differ in length and content."""
    for name, rows in SHARDS.items():
        world.add_shard(
            name, [f"{name} {index} " + "x" * (7 * index % 50) for index in range(rows)]
        )
    return world


@pytest.fixture
def full_world(world):
    return add_shards(world)


@pytest.fixture(scope="session")
def reference(tmp_path_factory, tiny_model):
    """The results of the full world's job when nobody disturbs it, and its tokens."""
    world = add_shards(World(tmp_path_factory.mktemp("reference"), tiny_model))
    assert world.run().exit_code == ExitCode.OK
    return world.results(), world.tokens_generated


def test_every_row_is_answered_in_order_with_its_kept_columns(full_world, reference):
    results, _ = reference
    assert {name: len(rows) for name, rows in results.items()} == SHARDS
    for name, rows in results.items():
        assert [row["row"] for row in rows] == list(range(len(rows)))
        assert [row["id"] for row in rows] == [f"{name}-{index}" for index in range(len(rows))]
        assert {row["status"] for row in rows} == {"ok"}
        assert all(row["output_tokens"] == 12 for row in rows if row["finish_reason"] == "length")
    reasons = {row["finish_reason"] for rows in results.values() for row in rows}
    assert reasons == {"stop", "length"}


def test_a_finished_job_verifies_and_leaves_nothing_behind(full_world, reference):
    summary = full_world.run()
    assert (summary.exit_code, summary.rows, summary.tally.rows) == (0, 50, 50)
    assert full_world.results() == reference[0]
    assert full_world.problems() == []
    assert full_world.leftovers() == []


def test_a_finished_job_returns_at_once_without_a_model(full_world):
    full_world.run()
    before = full_world.tokens_generated

    def refuse(job):
        raise AssertionError("the model was loaded")

    assert run(full_world.settings(), open_engine=refuse).exit_code == ExitCode.OK
    assert full_world.tokens_generated == before


def kill_at(monkeypatch, operation, place, after):
    """Kill this process before or after the n-th rename, removal or sync of a file."""
    real, places = getattr(os, operation), itertools.count(1)

    def deadly(*arguments, **options):
        here = next(places) == place
        if here and not after:
            kill()
        try:
            return real(*arguments, **options)
        finally:
            if here:
                kill()

    monkeypatch.setattr(os, operation, deadly)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("operation", ["replace", "unlink", "fsync"])
def test_case_A_killed_around_any_file_operation_every_row_is_there_once(
    tmp_path, tiny_model, reference, operation, after
):
    for place in itertools.count(1, 9):
        folder = tmp_path / str(place)
        folder.mkdir()
        world = add_shards(World(folder, tiny_model))
        with pytest.MonkeyPatch.context() as patch:
            code = world.fork(partial(kill_at, patch, operation, place, after))
        if code == ExitCode.OK:
            break
        assert code == -signal.SIGKILL
        assert world.run().exit_code == ExitCode.OK
        assert world.results() == reference[0]
        assert world.problems() == []
        assert world.leftovers() == []
        # a part's rows and those in flight are the most that can be lost
        assert world.tokens_generated <= reference[1] + (10 + 8 + 8) * 12
    assert place > 9


@pytest.mark.parametrize("steps", [1, 7, 20])
def test_case_A_killed_inside_a_step_every_row_is_there_once(full_world, reference, steps):
    seen = 0

    def die():
        nonlocal seen
        seen += 1
        if seen == steps:
            kill()

    assert full_world.fork(lambda: None, before_step=die) == -9
    assert full_world.run().exit_code == ExitCode.OK
    assert full_world.results() == reference[0]
    assert full_world.problems() == []


@pytest.mark.parametrize("after", [False, True], ids=["d", "e"])
@pytest.mark.parametrize("shard", SHARDS)
def test_case_A_killed_around_the_rename_of_a_result_file(full_world, reference, shard, after):
    def prepare():
        real = os.replace

        def deadly(source, target):
            here = Path(target) == full_world.directory.result(shard)
            if here and not after:
                kill()
            real(source, target)
            if here:
                kill()

        os.replace = deadly

    assert full_world.fork(prepare) == -signal.SIGKILL
    assert full_world.directory.result(shard).exists() == after
    assert full_world.run().exit_code == ExitCode.OK
    assert full_world.results() == reference[0]
    assert full_world.problems() == []
    assert full_world.leftovers() == []


def test_case_B_rows_with_the_same_prompt_are_different_rows(world):
    world.add_shard("a.parquet", ["same"] * 3 + [f"prompt {index}" for index in range(7)])
    finished = []
    stop = Stop()

    def stop_after_four(step):
        finished.extend(completion.id.index for completion in step.completions)
        if len(finished) >= 4:
            stop.request("test")

    world.run(observe=stop_after_four, stop=stop, batch=2)
    assert len(finished) < 10
    assert set(finished) & {0, 1, 2}
    assert world.run().exit_code == ExitCode.OK
    [rows] = world.results().values()
    assert [row["row"] for row in rows] == list(range(10))
    assert len({row["text"] for row in rows[:3]}) == 1


def rewrite(path, change):
    pq.write_table(change(pq.read_table(path)), path)


def insert_at_top(table):
    return pa.concat_tables([table.slice(0, 1), table])


CHANGES = {
    "row inserted": lambda world: rewrite(world.folder / "input/a.parquet", insert_at_top),
    "shard rewritten": lambda world: world.add_shard("a.parquet", ["other"] * 24),
    "shard added": lambda world: world.add_shard("new.parquet", ["new"]),
    "shard removed": lambda world: (world.folder / "input/d.parquet").unlink(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_case_C_a_changed_input_is_refused_before_the_model_loads(full_world, change):
    full_world.run_and_stop(12)
    before = snapshot(full_world.folder / "run")
    change(full_world)

    def refuse(job):
        raise AssertionError("the model was loaded")

    with pytest.raises(MismatchError, match="input shard") as raised:
        run(full_world.settings(), open_engine=refuse)
    assert raised.value.exit_code == 2
    assert " then, " in str(raised.value)
    assert snapshot(full_world.folder / "run") == before


def snapshot(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_case_C_a_changed_setting_is_refused_with_both_values(full_world):
    full_world.run_and_stop(12)
    with pytest.raises(MismatchError, match=r"temperature: 0\.0 then, 0\.7 now"):
        full_world.run("generation.temperature=0.7")
    with pytest.raises(MismatchError, match="--limit: none then, 10 now"):
        full_world.run(limit=10)


def test_case_C_another_model_is_refused(full_world, tiny_model, tmp_path):
    full_world.run_and_stop(12)
    copy = tmp_path / "model"
    shutil.copytree(tiny_model, copy)
    config = json.loads((copy / "generation_config.json").read_text())
    (copy / "generation_config.json").write_text(json.dumps(config | {"note": 1}))
    with pytest.raises(MismatchError, match="generation_config"):
        full_world.run(f'model.name="{copy}"')


def test_case_C_touching_a_file_is_no_change(full_world, reference):
    full_world.run_and_stop(12)
    os.utime(full_world.folder / "input/a.parquet", (1, 1))
    assert full_world.run().exit_code == ExitCode.OK
    assert full_world.results() == reference[0]


def test_case_E_stopped_every_few_steps_the_job_finishes_in_one_pass_of_tokens(
    full_world, reference
):
    for _ in range(200):
        summary = full_world.run_and_stop(6)
        if summary.exit_code == ExitCode.OK:
            break
        assert summary.exit_code == ExitCode.RUN_AGAIN
    assert full_world.results() == reference[0]
    assert full_world.tokens_generated == reference[1]


def test_a_second_sigint_stops_at_once_and_loses_nothing_committed(full_world, reference):
    steps = itertools.count(1)

    def interrupt():
        if next(steps) == 30:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(full_world.settings(), open_engine=fake_engine(before_step=interrupt))
    committed = Progress(full_world.directory, SHARDS).rows_done
    assert committed > 0
    summary = full_world.run()
    assert summary.exit_code == ExitCode.OK
    assert full_world.results() == reference[0]


def test_case_F_a_second_start_is_refused_and_disturbs_nothing(full_world, reference):
    pid = os.fork()
    if pid == 0:
        full_world.run(before_step=lambda: time.sleep(60))
        os._exit(0)
    try:
        devices = full_world.directory.claims / "devices"
        while not list(devices.rglob("*.json")):
            time.sleep(0.01)
        with pytest.raises(DeviceBusyError, match=f"process {pid}") as raised:
            full_world.run()
        assert raised.value.exit_code == 75
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    assert full_world.run().exit_code == ExitCode.OK
    assert full_world.results() == reference[0]


def test_case_F_a_refused_second_start_leaves_the_first_to_finish(full_world, reference):
    name = device_name("cpu")
    first = full_world.start_worker(name, before_step=lambda: time.sleep(0.02))
    while not list((full_world.directory.claims / "devices").rglob("*.json")):
        time.sleep(0.01)
    with pytest.raises(DeviceBusyError):
        full_world.run()
    assert os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) == ExitCode.OK
    assert full_world.results() == reference[0]
    assert full_world.problems() == []


def test_case_F_workers_on_other_devices_join_in_and_none_waits_for_a_checkpoint(
    full_world, reference
):
    # the checkpoint is an hour away: only the end of the work brings rows to the disk
    slow = {"before_step": lambda: time.sleep(0.002)}
    pids = [full_world.start_worker(f"device-{number}", **slow) for number in range(3)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert codes == [ExitCode.OK] * 3
    assert full_world.results() == reference[0]
    assert full_world.problems() == []
    assert full_world.leftovers() == []


def test_half_a_static_batch_does_not_wait_for_what_another_worker_holds(full_world):
    directory = full_world.directory
    directory.create()
    # alive, as this process is, and slow
    slow = replace(Identity.of_this_process("elsewhere"), token="other")
    claims = Claims(directory.claims, directory.temporary, slow)
    assert claims.acquire("spans/d.parquet/000000000000")
    stop, answered, idle = Stop(), set(), itertools.count()

    def observe(step):
        answered.update(completion.id for completion in step.completions)
        if len(answered) == 24 + 17:
            stop.request("all but the other's rows are there")
        assert not step.idle or next(idle) < 100, "the rest of a batch waits for company"

    full_world.run(observe=observe, stop=stop, policy=Static())
    assert {row.shard for row in answered} == {"a.parquet", "b/c.parquet"}


def test_a_killed_workers_rows_are_taken_over_by_one_that_waits(full_world, reference):
    doomed = full_world.start_worker("doomed", before_step=lambda: time.sleep(60))
    spans = full_world.directory.claims / "spans"
    while not list(spans.rglob("*.json")):
        time.sleep(0.01)
    heir = full_world.start_worker("heir")
    time.sleep(0.5)
    os.kill(doomed, signal.SIGKILL)
    os.waitpid(doomed, 0)
    assert os.waitstatus_to_exitcode(os.waitpid(heir, 0)[1]) == ExitCode.OK
    assert full_world.results() == reference[0]


def test_case_G_a_resumed_run_counts_on_and_rates_only_its_own(full_world, reference):
    metrics = ("progress.metrics=true", "progress.every=1ms")
    full_world.run_and_stop(40, *metrics)
    path = full_world.folder / "run/metrics.jsonl"
    first = [json.loads(line) for line in path.read_text().splitlines()]
    full_world.run(*metrics)
    second = [json.loads(line) for line in path.read_text().splitlines()][len(first) :]
    assert 0 < first[-1]["rows_done"] < 50
    for lines in (first, second):
        assert ["machine" in line for line in lines] == [True] + [False] * (len(lines) - 1)
    percents = [line["percent"] for line in first + second]
    assert percents == sorted(percents)
    assert percents[-1] == 100
    assert first[-1]["output_tokens"] + second[-1]["output_tokens"] == reference[1]
    assert second[-1]["rows_this_run"] == 50 - first[-1]["rows_done"]


def test_case_I_one_wrong_row_leaves_the_others_as_they_are(world, tmp_path, tiny_model):
    prompts = [f"prompt {index}" for index in range(6)]
    world.add_shard("a.parquet", [*prompts[:3], None, *prompts[4:]])
    summary = world.run()
    assert summary.exit_code == ExitCode.ROW_ERRORS
    assert summary.tally.errors == {"null_prompt": 1}
    [rows] = world.results().values()
    assert [row["row"] for row in rows] == list(range(6))
    assert [row["error_kind"] for row in rows] == [None] * 3 + ["null_prompt"] + [None] * 2
    assert rows[3]["text"] is None
    (tmp_path / "without").mkdir()
    without = World(tmp_path / "without", tiny_model)
    without.add_shard("a.parquet", prompts[:3] + prompts[4:])
    without.run()
    [expected] = without.results().values()
    texts = [row["text"] for row in rows if row["status"] == "ok"]
    assert texts == [row["text"] for row in expected]


def test_a_shard_of_errors_and_one_without_rows_have_result_files(world):
    world.add_shard("errors.parquet", [None, "", None])
    world.add_shard("none.parquet", [])
    summary = world.run()
    assert summary.exit_code == ExitCode.ROW_ERRORS
    assert summary.tally.errors == {"empty_prompt": 1, "null_prompt": 2}
    assert {name: len(rows) for name, rows in world.results().items()} == {
        "errors.parquet": 3,
        "none.parquet": 0,
    }
    assert world.problems() == []


def test_the_first_step_runs_before_one_percent_of_the_input_is_read(world, monkeypatch):
    world.add_shard("big.parquet", (f"prompt {index}" for index in range(40_000)))
    read = 0
    batches_of = sources.Reader.read

    def counted(*arguments, **options):
        nonlocal read
        for rows in batches_of(*arguments, **options):
            read += len(rows)
            yield rows

    monkeypatch.setattr(sources.Reader, "read", counted)
    read_at_first_step = []
    stop = Stop()

    def observe(step):
        if not step.idle:
            read_at_first_step.append(read)
            stop.request("seen enough")

    world.run(observe=observe, stop=stop)
    assert 0 < read_at_first_step[0] < 40_000 * 0.01


def test_a_full_disk_ends_the_job_and_the_next_run_finishes_it(full_world, reference, monkeypatch):
    real = layout.sync
    calls = 0

    def full(path):
        nonlocal calls
        calls += 1
        if calls > 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path)

    with monkeypatch.context() as patch:
        patch.setattr(layout, "sync", full)
        with pytest.raises(OSError, match="No space left"):
            full_world.run()
    assert full_world.run().exit_code == ExitCode.OK
    assert full_world.results() == reference[0]
    assert full_world.leftovers() == []


def test_limit_takes_the_first_rows_as_the_whole_input(full_world, reference):
    summary = full_world.run(limit=30)
    assert (summary.exit_code, summary.rows) == (ExitCode.OK, 30)
    results = full_world.results()
    assert {name: len(rows) for name, rows in results.items()} == {
        "a.parquet": 24,
        "b/c.parquet": 6,
    }
    assert results["b/c.parquet"] == reference[0]["b/c.parquet"][:6]
    assert full_world.problems(limit=30) == []


def test_messages_go_through_the_chat_template(world):
    messages = [[{"role": "user", "content": "Hello"}], None, [{"role": "bad", "content": "x"}]]
    table = pa.table({"id": ["1", "2", "3"], "prompt": messages})
    (world.folder / "input").mkdir()
    pq.write_table(table, world.folder / "input/m.parquet")
    text = world.job_file.read_text().replace('prompt = "prompt"', 'messages = "prompt"')
    world.job_file.write_text(text)
    world.run()
    [rows] = world.results().values()
    assert [row["error_kind"] for row in rows] == [None, "null_prompt", "template_error"]


def test_a_missing_column_is_refused_with_the_nearest(full_world):
    with pytest.raises(ConfigError, match="no column `promt`") as raised:
        full_world.run("input.prompt=promt")
    assert "prompt" in raised.value.hint


def test_a_row_that_cannot_fit_the_memory_is_an_error_row(world):
    world.add_shard("a.parquet", ["short", "long " * 40, "short too"])
    world.run(blocks=10)
    [rows] = world.results().values()
    assert [row["error_kind"] for row in rows] == [None, "cannot_fit", None]


def test_an_input_that_changes_while_the_job_runs_ends_it(full_world):
    def change(step):
        if step.completions:
            full_world.add_shard("a.parquet", ["changed"] * 24)

    with pytest.raises(InfrastructureError, match="changed while the job ran"):
        full_world.run(observe=change)


@pytest.mark.parametrize("place", ["input/out", "input"])
def test_a_run_directory_inside_the_input_is_refused(full_world, place):
    with pytest.raises(ConfigError, match="lies in the input"):
        full_world.run(f"output.path={place}")
    assert not (full_world.folder / "input/out").exists()


def test_two_shards_with_one_result_name_are_refused(world):
    world.add_shard("a.parquet", ["x"])
    shutil.copy(world.folder / "input/a.parquet", world.folder / "input/a")
    with pytest.raises(ConfigError, match="same result file"):
        world.run("input.path=input/*")


def test_a_stop_string_ends_the_text_in_the_result_file(full_world, reference):
    full_world.run('generation.stop=["a", "Zo"]')
    rows = [row for rows in full_world.results().values() for row in rows]
    whole = [row["text"] for rows in reference[0].values() for row in rows]
    for row, text in zip(rows, whole, strict=True):
        ends = [place for stop in ("a", "Zo") if (place := text.find(stop)) >= 0]
        assert row["text"] == (text[: min(ends)] if ends else text)
        if ends:
            assert row["finish_reason"] == "stop"
    assert any(row["text"] != text for row, text in zip(rows, whole, strict=True))


def test_answers_to_a_text_that_was_there_for_a_while_are_never_committed(full_world, reference):
    """The shard is rewritten while the job runs, and restored for the next run."""
    path = full_world.folder / "input/b/c.parquet"
    original = path.read_bytes()

    def rewrite_first():
        if path.read_bytes() == original:
            full_world.add_shard("b/c.parquet", ["something else"] * 17)

    with pytest.raises(InfrastructureError, match="changed while the job ran"):
        full_world.run(before_step=rewrite_first)
    path.write_bytes(original)
    assert full_world.run().exit_code == ExitCode.OK
    assert full_world.results() == reference[0]


def test_results_without_a_record_of_their_job_are_refused(full_world):
    full_world.run()
    shutil.rmtree(full_world.directory.state)
    with pytest.raises(MismatchError, match="no record of the job"):
        full_world.run("generation.temperature=0.9")


def test_folders_behind_links_belong_to_the_input_once(world, tmp_path):
    world.add_shard("a.parquet", ["x"])
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(world.folder / "input/a.parquet", tmp_path / "elsewhere/B.PARQUET")
    (world.folder / "input/link").symlink_to(tmp_path / "elsewhere")
    (world.folder / "input/loop").symlink_to(world.folder / "input")
    world.run()
    assert sorted(world.results()) == ["a.parquet", "link/B.PARQUET.parquet"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("input.path=input/*/../a.parquet", "`..` after a wildcard"),
        ('input.keep=["id", "id"]', "must not name a column twice"),
        ("input.path=~nosuchuser/x", "does not exist"),
        ('output.path="a\\u0000b"', "without NUL"),
        ("checkpoint.grace=99999999999d", "`checkpoint.grace`"),
        ("generation.stop_token_ids=[-1]", "`generation.stop_token_ids`"),
        ("batching.block_size=100000000", "`batching.block_size`"),
        ("model.threads=100000", "`model.threads`"),
        ("output.path=job.toml", "is a file"),
        ("generation.max_new_tokens=" + "9" * 6000, "`generation.max_new_tokens`"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_words(full_world, change, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        full_world.run(change)


@pytest.mark.parametrize("content", ["", "[]", "3", "{"])
def test_a_damaged_record_of_the_job_is_named(full_world, content):
    full_world.run_and_stop(12)
    full_world.directory.job_file.write_text(content)
    with pytest.raises(InfrastructureError, match=r"job\.json` is damaged"):
        full_world.run()


@pytest.mark.parametrize("kind", ["parts", "partials"])
@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "other"])
def test_a_damaged_file_of_the_run_is_named_and_removing_it_mends_the_job(
    full_world, reference, kind, damage
):
    full_world.run_and_stop(12)
    found = sorted((full_world.directory.state / kind).rglob("*.parquet"))
    path = next(path for path in found if path.is_file())
    content = bytearray(path.read_bytes())
    if damage == "other":
        pq.write_table(pa.table({"x": [1]}), path)
    elif damage == "flipped":
        # inside the first data page, behind the magic bytes
        content[10:60] = bytes(50)
        path.write_bytes(content)
    else:
        path.write_bytes(b"" if damage == "empty" else bytes(content[:-20]))
    with pytest.raises(InfrastructureError, match=re.escape(str(path))) as raised:
        full_world.run()
    assert "remove this file" in raised.value.hint
    path.unlink()
    assert full_world.run().exit_code == ExitCode.OK
    assert full_world.results() == reference[0]


def test_strange_files_of_others_in_the_state_folder_end_no_job(full_world, reference):
    full_world.run_and_stop(12)
    temporary = full_world.directory.temporary
    (temporary / ".nfs000123").touch()
    (temporary / "folder").mkdir()
    (full_world.directory.claims / "spans/x.json").mkdir(parents=True)
    assert full_world.run().exit_code == ExitCode.OK
    assert full_world.results() == reference[0]


def test_a_log_that_cannot_be_written_ends_the_job_as_a_full_disk_does(full_world, monkeypatch):
    def full(self, record):
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError:
            self.handleError(record)

    monkeypatch.setattr(logging.FileHandler, "emit", full)
    with pytest.raises(OSError, match="No space left"):
        full_world.run()


def test_a_column_of_another_type_is_announced_and_its_rows_are_errors(world, caplog):
    world.add_shard("a.parquet", [1, 2, 3], pa.int64())
    summary = world.run()
    assert summary.tally.errors == {"bad_type": 3}
    assert "column `prompt` of `a.parquet` is int64, not text" in caplog.text
