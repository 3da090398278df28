"""Error rows run again when asked to, exactly those, and a kill at any instant loses nothing."""

import itertools
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from jobrunner.data.claims import Claims, Identity
from jobrunner.data.intervals import Intervals
from jobrunner.data.layout import RunDirectory, outcome_schema
from jobrunner.data.ledger import Ledger
from jobrunner.data.progress import Progress, clean_up
from jobrunner.data.results.merge import merge_shard
from jobrunner.data.results.parts import Results, list_parts
from jobrunner.data.results.pending import read_pending
from jobrunner.data.results.result_files import read_outcomes
from jobrunner.data.results.retry import mark_retries
from jobrunner.errors import DeviceBusyError
from jobrunner.records import Span
from tests.data.conftest import answer, failure, kept_columns

ROWS = {"a.parquet": 6, "b.parquet": 8, "errors.parquet": 3, "good.parquet": 2, "none.parquet": 0}
SPANS = [
    Span(shard, start, min(start + 4, rows))
    for shard, rows in ROWS.items()
    for start in range(0, rows, 4)
]
WRONG = {("a.parquet", 1), ("a.parquet", 4), ("b.parquet", 2)}
WRONG |= {("errors.parquet", index) for index in range(3)}


class World:
    """A run directory and the workers that pass through it; each leaves a note of what it ran."""

    def __init__(self, root, suffix=".parquet"):
        self.root = root
        self.suffix = suffix
        self.log = root.parent / "answered"

    def worker(self):
        identity = replace(Identity.of_this_process("cpu"), token=os.urandom(4).hex())
        run = RunDirectory(self.root, identity.worker, self.suffix)
        run.create()
        return run, Claims(run.claims, run.temporary, identity)

    @property
    def run_directory(self):
        return RunDirectory(self.root, "test-0-00", self.suffix)

    def run(self, text, wrong=(), retry=False, stop_after=99):
        """Run the job as a worker that answers every row with `text`; return its progress."""
        run, claims = self.worker()
        claims.sweep()
        clean_up(run, ROWS, claims.abandoned)
        if retry:
            mark_retries(run, ROWS, claims)
        progress = Progress(run, ROWS)
        ledger = Ledger(
            run,
            claims,
            progress,
            Results(run, part_rows=2),
            SPANS,
            merge=lambda shard: merge_shard(run, shard, ROWS[shard], *kept_columns(ROWS[shard])),
            check_input=lambda shard: None,
        )
        with ledger:
            assignments = ledger.assignments(lambda seconds: True)
            for assignment in itertools.islice(assignments, stop_after):
                self.answer(ledger, assignment, text, wrong)
            if stop_after == 99:
                list(ledger.settle(lambda seconds: False))
        return progress

    def answer(self, ledger, assignment, text, wrong):
        shard, start, stop = assignment.span
        for index in range(start, stop):
            if index not in assignment.done:
                with self.log.open("a") as log:
                    log.write(f"{shard} {index}\n")
                row = failure if (shard, index) in wrong else answer
                [finished] = row(shard, index, *([] if row is failure else [text])).answers
                ledger.finish(finished.completion, finished.text)
        ledger.checkpoint([])

    def answered(self):
        """The rows that workers ran since this was last asked."""
        found = [line.split() for line in self.log.read_text().splitlines()]
        self.log.write_text("")
        return sorted((shard, int(index)) for shard, index in found)

    def texts(self):
        """The text of every row of every result file, None where it is an error."""
        return {
            (shard, index): text
            for shard in ROWS
            for table in read_outcomes(self.run_directory, shard, outcome_schema())
            for index, text in zip(table["row"].to_pylist(), table["text"].to_pylist(), strict=True)
        }

    def leftovers(self):
        state = self.run_directory.state
        found = [path.relative_to(state) for path in state.rglob("*") if path.is_file()]
        return [path for path in found if path.parts[0] != "tallies"]

    def fork(self, prepare, **options):
        """Run in a child process that `prepare` arranges to kill; return how it ended."""
        pid = os.fork()
        if pid == 0:
            prepare()
            self.run("again", **options)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


ALL_ROWS = {(shard, index) for shard, rows in ROWS.items() for index in range(rows)}
FIRST = {row: None if row in WRONG else "first" for row in ALL_ROWS}
RETRIED = {row: "again" if row in WRONG else "first" for row in ALL_ROWS}


@pytest.fixture(params=[".parquet", ".jsonl.gz"])
def world(request, tmp_path):
    """A finished job with errors."""
    world = World(tmp_path / "run", request.param)
    world.run("first", WRONG)
    assert world.texts() == FIRST
    world.answered()
    return world


@pytest.fixture
def unfinished(tmp_path):
    """A job that was stopped when its first two shards were in parts."""
    world = World(tmp_path / "run")
    world.run("first", WRONG, stop_after=3)
    world.answered()
    return world


def test_case_D_a_failed_row_is_final_until_it_is_asked_to_run_again(world):
    world.run("again")
    world.run("again")
    assert world.answered() == []
    assert world.texts() == FIRST
    progress = world.run("again", retry=True)
    assert world.answered() == sorted(WRONG)
    assert world.texts() == RETRIED
    assert (progress.complete, progress.tally.rows, progress.tally.error_rows) == (True, 19, 0)
    assert world.leftovers() == []


def test_case_D_error_rows_of_an_unfinished_shard_run_again_with_those_not_done(unfinished):
    unfinished.run("again", retry=True)
    done = {("a.parquet", index) for index in range(6)} | {("b.parquet", i) for i in range(4)}
    assert unfinished.answered() == sorted(ALL_ROWS - done | WRONG)
    assert unfinished.texts() == {
        row: "first" if row in done - WRONG else "again" for row in ALL_ROWS
    }
    assert unfinished.leftovers() == []


def test_rows_that_fail_again_are_error_rows_again_and_counted_once(world):
    progress = world.run("again", wrong=WRONG, retry=True)
    assert world.texts() == FIRST
    assert progress.tally.errors == {"null_prompt": 6}
    world.run("later", retry=True)
    assert world.texts() == {row: text or "later" for row, text in FIRST.items()}


def test_the_old_result_stays_until_the_new_one_is_there(world):
    world.run("again", retry=True, stop_after=1)
    assert world.texts() == FIRST
    progress = Progress(world.run_directory, ROWS)
    assert not progress.complete
    assert progress["a.parquet"].done == Intervals([(0, 4), (5, 6)])
    assert (progress.rows_done, progress.tally.rows, progress.tally.error_rows) == (14, 14, 0)
    world.run("later")
    assert world.texts()[("a.parquet", 1)] == "again"
    assert world.texts()[("a.parquet", 4)] == "later"


def test_asking_again_while_rows_are_to_run_again_forgets_none(world):
    world.run("again", wrong=WRONG, retry=True, stop_after=1)
    assert len(list_parts(world.run_directory, "a.parquet")) == 1
    world.answered()
    world.run("later", retry=True)
    assert world.answered() == sorted(WRONG)
    assert world.texts() == {row: text or "later" for row, text in FIRST.items()}


def test_marking_says_how_many_rows_run_again_and_leaves_good_shards_alone(world):
    run, claims = world.worker()
    assert mark_retries(run, ROWS, claims) == len(WRONG)
    assert read_pending(run, "good.parquet") is None
    assert read_pending(run, "errors.parquet").rows == Intervals([(0, 3)])
    assert mark_retries(run, ROWS, claims) == 0


def test_a_job_without_errors_has_nothing_to_run_again(tmp_path):
    world = World(tmp_path / "run")
    world.run("first")
    assert mark_retries(*world.worker()[:1], ROWS, world.worker()[1]) == 0
    assert Progress(world.run_directory, ROWS).complete


def test_a_record_without_its_result_is_dropped_and_the_shard_runs_anew(world):
    run, claims = world.worker()
    mark_retries(run, ROWS, claims)
    run.result("a.parquet").unlink()
    assert Progress(run, ROWS)["a.parquet"].done == Intervals()
    world.run("again")
    assert world.texts() == RETRIED | {("a.parquet", index): "again" for index in range(6)}
    assert world.leftovers() == []


def test_retries_are_refused_while_another_worker_is_at_work(world):
    # a process that lives, as a worker of this host
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            run, claims = world.worker()
            claims.acquire("devices/x")
            mark_retries(run, [], claims)
            mine = Identity.of_this_process("other")
            stat = Path(f"/proc/{process.pid}/stat").read_text()
            started = int(stat.rpartition(")")[2].split()[19])
            other = replace(mine, pid=process.pid, started=started)
            Claims(run.claims, run.temporary, other).acquire("spans/a/0")
            with pytest.raises(DeviceBusyError, match=f"process {process.pid}") as raised:
                mark_retries(run, ROWS, claims)
            assert raised.value.exit_code == 75
            assert Progress(run, ROWS).complete
        finally:
            process.kill()
    # it is gone: its claim keeps nobody
    assert mark_retries(run, ROWS, claims) == len(WRONG)


def kill_at(operation, place, after):
    """Kill this process before or after the n-th rename, removal or sync of a file."""
    real, places = getattr(os, operation), itertools.count(1)

    def deadly(*arguments, **options):
        here = next(places) == place
        if here and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return real(*arguments, **options)
        finally:
            if here:
                os.kill(os.getpid(), signal.SIGKILL)

    setattr(os, operation, deadly)


# every how many-th operation a kill is tried at
STEPS = {"replace": 2, "unlink": 7, "fsync": 13}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("operation", STEPS)
@pytest.mark.parametrize("retry", [False, True], ids=["goes on", "asked again"])
def test_case_D_killed_around_any_file_operation_every_row_is_there_once(
    tmp_path, operation, after, retry
):
    suffix = ".jsonl" if operation == "replace" else ".parquet"
    for place in itertools.count(1, STEPS[operation]):
        folder = tmp_path / str(place)
        world = World(folder / "run", suffix)
        folder.mkdir()
        world.run("first", WRONG)
        world.answered()
        code = world.fork(lambda place=place: kill_at(operation, place, after), retry=True)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        assert world.texts().keys() == FIRST.keys()
        progress = world.run("again", retry=retry)
        assert progress.complete
        # rows that the kill kept from being asked for are the errors that they were
        asked = set(WRONG) if retry else {row for row in WRONG if world.texts()[row] == "again"}
        assert world.texts() == FIRST | dict.fromkeys(asked, "again")
        assert set(world.answered()) == asked
        assert progress.tally.error_rows == len(WRONG - asked)
        assert world.leftovers() == []
    assert place > 6
