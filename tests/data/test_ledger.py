"""The books of one worker, and of two that meet."""

import threading
from dataclasses import replace
from itertools import pairwise

import pytest

from jobrunner.data import layout
from jobrunner.data.claims import STALE_S, Claims, Identity
from jobrunner.data.intervals import Intervals
from jobrunner.data.layout import RunDirectory
from jobrunner.data.ledger import Ledger
from jobrunner.data.progress import Progress, load_partials
from jobrunner.data.results.merge import merge_shard
from jobrunner.data.results.parts import Results, list_parts
from jobrunner.errors import InfrastructureError
from jobrunner.records import (
    Completion,
    Partial,
    Request,
    RowError,
    RowId,
    SampleId,
    Sampling,
    Span,
)
from tests.data.conftest import answer, kept_columns, read_result

SHARD = "a.parquet"
SPANS = [Span(SHARD, 0, 3), Span(SHARD, 3, 5)]
ROWS = {SHARD: 5}


class Worker:
    """A worker's ledger with what it stands on; time passes only where a test says so."""

    def __init__(self, root, token="aa", spans=SPANS, rows=ROWS, **identity):
        self.identity = replace(Identity.of_this_process("cpu"), token=token, **identity)
        self.run = RunDirectory(root, self.identity.worker)
        self.run.create()
        self.claims = Claims(self.run.claims, self.run.temporary, self.identity)
        self.progress = Progress(self.run, rows)
        self.now_s = 0.0
        self.waiting = ()
        self.ledger = Ledger(
            self.run,
            self.claims,
            self.progress,
            Results(self.run, part_rows=100),
            spans,
            lambda shard: merge_shard(self.run, shard, rows[shard], *kept_columns(rows[shard])),
            check_input=lambda shard: None,
            clock=lambda: self.now_s,
        )
        self._assignments = self.ledger.assignments(stopped=lambda seconds: False)

    @property
    def assignments(self):
        """What this worker gets until it has to wait."""
        return iter(lambda: next(self._assignments, None), None)

    def look(self, *, idle=False):
        """Let time pass and look whether there is something to share."""
        self.now_s += 1.0
        return self.ledger.share(idle=idle, take_back=self.take_back)

    def take_back(self):
        """Take back from the engine what only waits there."""
        self.ledger.unbegin(RowId(SHARD, index) for index in self.waiting)
        self.waiting = ()

    def answer(self, *indices):
        for index in indices:
            [finished] = answer(SHARD, index).answers
            self.ledger.finish(finished.completion, finished.text)

    def settle(self):
        """Settle, and name the shards that this worker merged."""
        return [shard for merged in self.ledger.settle(lambda seconds: False) for shard in merged]


@pytest.fixture
def worker(tmp_path):
    worker = Worker(tmp_path)
    with worker.ledger:
        yield worker


@pytest.fixture
def other(tmp_path, worker):
    other = Worker(tmp_path, token="bb")
    with other.ledger:
        yield other


def test_spans_are_claimed_one_after_the_other_and_only_when_asked(worker, other):
    assert next(worker.assignments).span == SPANS[0]
    assert next(other.assignments).span == SPANS[1]
    assert next(worker.assignments, None) is None


def test_a_checkpoint_commits_rows_and_saves_tokens(worker):
    next(worker.assignments)
    worker.answer(1)
    worker.ledger.checkpoint([Partial(RowId(SHARD, 0), [5, 6], 1)])
    assert len(list_parts(worker.run, SHARD)) == 1
    assert load_partials(worker.run, SPANS[0]) == {
        SampleId(RowId(SHARD, 0)): Partial(RowId(SHARD, 0), [5, 6], 1)
    }


def test_a_finished_shard_is_merged_and_leaves_nothing_behind(worker):
    assert [assignment.span for assignment in worker.assignments] == SPANS
    worker.answer(4, 3, 2, 1, 0)
    worker.ledger.checkpoint([])
    assert worker.settle() == [SHARD]
    assert [row["text"] for row in read_result(worker.run, SHARD)] == [
        f"answer {index}" for index in range(5)
    ]
    left = [path for path in worker.run.state.rglob("*") if path.is_file()]
    assert left == []


def test_the_next_worker_gets_what_is_done_and_what_was_in_flight(tmp_path, worker):
    next(worker.assignments)
    worker.answer(1)
    worker.ledger.checkpoint([Partial(RowId(SHARD, 0), [5, 6], 1)])
    worker.claims.release_all()
    with Worker(tmp_path, token="cc").ledger as ledger:
        assignment = next(ledger.assignments(lambda seconds: True))
        assert assignment.span == SPANS[0]
        assert [index in assignment.done for index in range(3)] == [False, True, False]
        assert assignment.partials == {
            SampleId(RowId(SHARD, 0)): Partial(RowId(SHARD, 0), [5, 6], 1)
        }


def test_tokens_of_an_earlier_worker_survive_until_their_row_is_read_again(tmp_path, worker):
    next(worker.assignments)
    saved = Partial(RowId(SHARD, 2), [5, 6], 1)
    worker.ledger.checkpoint([saved])
    worker.claims.release_all()
    heir = Worker(tmp_path, token="cc")
    with heir.ledger:
        next(heir.assignments)
        heir.ledger.checkpoint([Partial(RowId(SHARD, 0), [1], 1)])
        assert load_partials(heir.run, SPANS[0])[SampleId(RowId(SHARD, 2))] == saved
        heir.answer(2)
        heir.ledger.checkpoint([])
        assert load_partials(heir.run, SPANS[0]) == {}


def test_a_finished_span_is_not_handed_out_again(tmp_path, worker):
    next(worker.assignments)
    worker.answer(0, 1, 2)
    worker.ledger.checkpoint([])
    worker.claims.release_all()
    with Worker(tmp_path, token="cc").ledger as ledger:
        assert [a.span for a in ledger.assignments(lambda seconds: True) if a] == [SPANS[1]]


def test_two_workers_share_a_shard_and_the_last_one_merges_it(worker, other):
    next(worker.assignments)
    next(other.assignments)
    worker.answer(0, 1, 2)
    worker.ledger.checkpoint([])
    assert worker.ledger.tick() == []
    other.answer(3, 4)
    other.ledger.checkpoint([])
    assert other.settle() == [SHARD]
    assert worker.settle() == []
    assert len(read_result(worker.run, SHARD)) == 5


def test_two_writers_on_one_span_give_each_row_once(worker, other):
    next(worker.assignments)
    next(worker.assignments)
    worker.answer(0, 1, 2, 3, 4)
    # the other one was stopped, lost its claims and wakes up with rows of its own
    other.answer(1, 2)
    other.ledger.checkpoint([])
    worker.ledger.checkpoint([])
    worker.settle()
    assert [row["row"] for row in read_result(worker.run, SHARD)] == list(range(5))


def test_a_worker_waits_for_spans_of_others_and_takes_over_what_they_give_back(tmp_path, worker):
    next(worker.assignments)
    other = Worker(tmp_path, token="bb")
    naps = []

    def nap(seconds):
        naps.append(seconds)
        worker.claims.release_all()
        # all is in its hands then
        return len(naps) > 2

    with other.ledger:
        claimed = list(other.ledger.assignments(nap))
    assert [a and a.span for a in claimed] == [SPANS[1], None, SPANS[0], None]


def test_a_failed_merge_ends_the_job(worker):
    list(worker.assignments)
    worker.answer(0, 1, 2, 3, 4)
    worker.ledger._merge = fail
    worker.ledger.checkpoint([])
    with pytest.raises(InfrastructureError, match="disk full"):
        worker.settle()


def fail(shard):
    raise InfrastructureError("disk full")


def test_a_heartbeat_is_given_on_its_clock(worker, monkeypatch):
    beats = []
    monkeypatch.setattr(worker.claims, "heartbeat", lambda: beats.append(worker.now_s))
    for now_s in (1.0, 11.0, 12.0, 22.0):
        worker.now_s = now_s
        worker.ledger.tick()
    assert beats == [11.0, 22.0]


def test_heartbeats_go_on_while_the_disk_is_slow(tmp_path, monkeypatch):
    """A checkpoint of many files, each of which the disk takes long to sync."""
    shards = [f"{name}.parquet" for name in "abcdef"]
    worker = Worker(tmp_path, spans=[Span(s, 0, 3) for s in shards], rows=dict.fromkeys(shards, 3))
    beats = [0.0]

    def slow(path):
        worker.now_s += 10.0

    def beat():
        beats.append(worker.now_s)

    with worker.ledger:
        assert len(list(worker.assignments)) == len(shards)
        for shard in shards:
            [finished] = answer(shard, 0).answers
            worker.ledger.finish(finished.completion, finished.text)
        monkeypatch.setattr(layout, "sync", slow)
        monkeypatch.setattr(worker.claims, "heartbeat", beat)
        worker.ledger.checkpoint([Partial(RowId(shard, 1), [5], 1) for shard in shards])
        assert worker.now_s > 4 * STALE_S
        assert max(b - a for a, b in pairwise([*beats, worker.now_s])) < STALE_S


def test_rows_committed_after_a_shard_was_merged_leave_no_strays(worker, other):
    list(worker.assignments)
    other.answer(1)
    worker.answer(0, 1, 2, 3, 4)
    worker.ledger.checkpoint([])
    worker.settle()
    # the other one was suspended while all of that happened
    other.ledger.checkpoint([])
    assert list_parts(worker.run, SHARD) == []
    assert other.progress.complete


def test_leaving_by_an_interrupt_does_not_wait_for_a_merge(tmp_path):
    worker, release = Worker(tmp_path), threading.Event()
    worker.ledger._merge = lambda shard: release.wait(60)
    list(worker.assignments)
    worker.answer(0, 1, 2, 3, 4)
    worker.ledger.checkpoint([])
    with pytest.raises(KeyboardInterrupt), worker.ledger:
        raise KeyboardInterrupt
    assert not release.is_set()
    release.set()
    assert list(worker.run.claims.rglob("*.json")) == []


def test_what_earlier_workers_left_in_flight_is_counted(tmp_path, worker):
    next(worker.assignments)
    worker.answer(1)
    saved = [Partial(RowId(SHARD, 0), [5, 6], 1), Partial(RowId(SHARD, 2), [7], 1)]
    worker.ledger.checkpoint(saved)
    worker.claims.release_all()
    with Worker(tmp_path, token="cc").ledger as ledger:
        assert ledger.saved() == (2, 3)


def sample(index, number, tokens=(5, 6), error=None):
    """One of two samples of a row, as the engine ends it."""
    row = RowId(SHARD, index)
    request = Request(row, [1], Sampling(9), sample=number, samples=2)
    reason = None if error else "stop"
    return Completion(row, tokens, reason, prompt_tokens=1, error=error, request=request)


def test_a_row_is_finished_with_its_last_sample(worker):
    next(worker.assignments)
    assert worker.ledger.finish(sample(0, 1), "second") is None
    assert worker.ledger.empty
    row = worker.ledger.finish(sample(0, 0), "first")
    assert [finished.text for finished in row.answers] == ["first", "second"]
    assert not worker.ledger.empty


def test_a_finished_sample_survives_until_its_row_is_committed(tmp_path, worker):
    next(worker.assignments)
    worker.ledger.finish(sample(0, 1), "second")
    in_flight = Partial(RowId(SHARD, 0), [7], 1, sample=0)
    worker.ledger.checkpoint([in_flight])
    saved = {0: in_flight, 1: Partial(RowId(SHARD, 0), [5, 6], 1, sample=1)}
    expected = {SampleId(RowId(SHARD, 0), number): found for number, found in saved.items()}
    assert load_partials(worker.run, SPANS[0]) == expected
    worker.claims.release_all()
    heir = Worker(tmp_path, token="cc")
    with heir.ledger:
        assert heir.ledger.saved() == (1, 3)
        assert next(heir.assignments).partials == expected
        heir.ledger.finish(sample(0, 0), "first")
        heir.ledger.finish(sample(0, 1), "second")
        heir.ledger.checkpoint([])
        assert load_partials(heir.run, SPANS[0]) == {}


def test_a_failed_sample_makes_its_row_an_error(worker):
    next(worker.assignments)
    worker.ledger.finish(sample(0, 0), "first")
    row = worker.ledger.finish(sample(0, 1, (), RowError("cannot_fit", "too long")), None)
    assert row.error == RowError("cannot_fit", "too long")
    worker.ledger.checkpoint([])
    assert worker.progress.refresh(SHARD).tally.errors == {"cannot_fit": 1}


def test_a_shard_whose_error_rows_run_again_meanwhile_is_not_merged(worker):
    list(worker.assignments)
    worker.answer(0, 1, 2, 3)
    worker.ledger.checkpoint([])
    # what this worker still believes: a part with row 4 was there and has gone
    worker.progress.mark_done({SHARD: Intervals([(4, 5)])})
    worker.ledger.checkpoint([])
    assert worker.ledger.tick() == []
    assert not worker.run.result(SHARD).exists()
    assert not worker.progress.complete


def begin(worker, *indices):
    worker.ledger.begin(RowId(SHARD, index) for index in indices)


@pytest.fixture
def pair(tmp_path):
    """Two workers on one span of 20 rows; the first holds it."""
    whole = [Span(SHARD, 0, 20)]
    with (
        (one := Worker(tmp_path, "aa", whole, {SHARD: 20})).ledger,
        (two := Worker(tmp_path, "bb", whole, {SHARD: 20})).ledger,
    ):
        assert [a.span for a in one.assignments] == whole
        assert [a.span for a in two.assignments] == []
        yield one, two


def ask(one, two):
    """The second has nothing to do, and the first looks twice to see it alive."""
    two.look(idle=True)
    one.look()
    two.look(idle=True)
    return one.look()


def test_a_worker_with_nothing_to_do_gets_half_of_what_another_has_not_begun(pair):
    one, two = pair
    begin(one, *range(10))
    assert ask(one, two)
    assert [a.span for a in two.assignments] == [Span(SHARD, 15, 20)]
    assert [one.ledger.wanted(RowId(SHARD, row)) for row in range(20)] == [True] * 15 + [False] * 5


def test_what_was_given_away_is_done_by_the_other_and_the_shard_is_merged_once(pair):
    one, two = pair
    assert ask(one, two)
    [taken] = two.assignments
    assert taken.span == Span(SHARD, 10, 20)
    two.answer(*range(10, 20))
    two.ledger.checkpoint([])
    one.answer(*range(10))
    one.ledger.checkpoint([])
    assert list(one.assignments) == []
    assert [*one.settle(), *two.settle()] == [SHARD]
    assert [row["row"] for row in read_result(one.run, SHARD)] == list(range(20))
    assert not list(one.run.state.rglob("cuts/*"))


def test_nothing_is_given_while_nobody_waits_nor_to_one_that_has_died(pair):
    one, two = pair
    assert not one.look()
    two.look(idle=True)
    # the first look cannot tell who is alive, the second sees no sign of life
    assert not one.look()
    assert not one.look()


def test_rows_that_were_begun_or_have_saved_tokens_are_never_given(tmp_path):
    whole = [Span(SHARD, 0, 20)]
    with (first := Worker(tmp_path, "aa", whole, {SHARD: 20})).ledger:
        list(first.assignments)
        first.ledger.checkpoint([Partial(RowId(SHARD, 17), (1, 2), 1)])
    one = Worker(tmp_path, "bb", whole, {SHARD: 20})
    two = Worker(tmp_path, "cc", whole, {SHARD: 20})
    with one.ledger, two.ledger:
        list(one.assignments)
        list(two.assignments)
        assert ask(one, two)
        assert [a.span for a in two.assignments] == [Span(SHARD, 19, 20)]


def test_rows_that_only_wait_in_the_engine_are_given_too(pair):
    one, two = pair
    begin(one, *range(20))
    # the long ones ran first: nothing before row 13 can be given
    one.waiting = (3, 4, *range(13, 20))
    assert ask(one, two)
    assert [a.span for a in two.assignments] == [Span(SHARD, 17, 20)]
    assert one.waiting == ()


def test_what_waits_in_the_engine_stays_there_while_nobody_is_idle(pair):
    one, two = pair
    begin(one, *range(20))
    one.waiting = (18, 19)
    for _ in range(3):
        two.look()
        assert not one.look()
    assert one.waiting == (18, 19)


def test_what_nobody_took_is_taken_back(pair):
    one, two = pair
    assert ask(one, two)
    assert list(one.assignments) == []
    one.now_s += 60
    assert [a.span for a in one.assignments] == [Span(SHARD, 10, 20)]
    assert one.ledger.wanted(RowId(SHARD, 19))


def test_a_whole_span_that_is_not_begun_is_let_go(tmp_path):
    one, two = Worker(tmp_path, "aa"), Worker(tmp_path, "bb")
    with one.ledger, two.ledger:
        assert [a.span for a in one.assignments] == SPANS
        assert list(two.assignments) == []
        begin(one, 0, 1, 2)
        assert ask(one, two)
        assert [a.span for a in two.assignments] == [Span(SHARD, 4, 5)]
        assert ask(one, two) is False


def test_several_that_wait_get_a_piece_each(pair, tmp_path):
    one, two = pair
    three = Worker(tmp_path, "cc", [Span(SHARD, 0, 20)], {SHARD: 20})
    with three.ledger:
        for gives in (False, True):
            three.look(idle=True)
            two.look(idle=True)
            assert one.look() is gives
        found = [next(three.assignments).span, next(two.assignments).span]
        assert found == [Span(SHARD, 7, 14), Span(SHARD, 14, 20)]


def test_cuts_outlive_the_workers_that_made_them(tmp_path, pair):
    one, two = pair
    assert ask(one, two)
    one.ledger.__exit__(None)
    with (heir := Worker(tmp_path, "dd", [Span(SHARD, 0, 20)], {SHARD: 20})).ledger:
        assert [a.span for a in heir.assignments] == [Span(SHARD, 0, 10), Span(SHARD, 10, 20)]
