"""The window between reading and the engine. No timing decides: threads meet at events."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.config import GenerationTable, InputTable
from jobrunner.data.feed import Feed
from jobrunner.data.input.shards import cut_spans, find_shards
from jobrunner.data.input.sources import Reader
from jobrunner.data.prompts.prompts import Prompts
from jobrunner.errors import InfrastructureError
from jobrunner.records import Completion, Request, RowError, RowId, Sampling
from tests.properties import examples
from tests.tiny_tokenizers import byte_level

PATIENCE_S = 30.0
Item = Request | Completion


def good(index: int, tokens: int = 1) -> Request:
    return Request(RowId("a", index), [0] * tokens, Sampling(max_new_tokens=1))


def bad(index: int) -> Completion:
    return Completion(RowId("a", index), error=RowError("null_prompt", "is null"))


def drain(feed: Feed, limit: int = 3) -> tuple[list[int], list[int]]:
    """Take everything, as the engine's loop does; return the rows of requests and errors."""
    requests: list[int] = []
    errors: list[int] = []
    while not feed.exhausted:
        feed.wait(PATIENCE_S)
        taken = list(feed.take(limit))
        assert len(taken) <= limit
        requests += [request.id.index for request in taken]
        errors += [error.id.index for error in feed.errors()]
    return requests, errors + [error.id.index for error in feed.errors()]


class Source:
    """Batches that say how many were pulled, and when the thread came to a given one."""

    def __init__(self, batches: list[list[Item]]) -> None:
        self._batches = batches
        self.pulled = 0
        self.closed = threading.Event()
        self.reached = {count: threading.Event() for count in range(1, len(batches) + 1)}

    def __iter__(self) -> Iterator[list[Item]]:
        try:
            for batch in self._batches:
                self.pulled += 1
                self.reached[self.pulled].set()
                yield batch
        finally:
            self.closed.set()


@examples(100)
@given(
    batches=st.lists(st.lists(st.integers(-1, 9), max_size=5), max_size=6),
    max_rows=st.integers(1, 4),
    max_tokens=st.integers(1, 12),
    limit=st.integers(1, 4),
)
def test_every_row_arrives_once_in_order(
    batches: list[list[int]], max_rows: int, max_tokens: int, limit: int
) -> None:
    rows = iter(range(1_000))
    items: list[list[Item]] = [
        [bad(next(rows)) if tokens < 0 else good(next(rows), tokens) for tokens in batch]
        for batch in batches
    ]
    flat = [item for batch in items for item in batch]
    with Feed(iter(items), max_rows, max_tokens) as feed:
        requests, errors = drain(feed, limit)
    assert requests == [item.id.index for item in flat if isinstance(item, Request)]
    assert errors == [item.id.index for item in flat if isinstance(item, Completion)]


def test_nothing_to_read_is_exhausted() -> None:
    with Feed(iter([]), 1, 1) as feed:
        feed.wait(PATIENCE_S)
        assert feed.exhausted
        assert list(feed.take(5)) == []
        assert feed.errors() == []


def test_take_never_blocks_while_nothing_is_ready() -> None:
    release = threading.Event()

    def batches() -> Iterator[list[Item]]:
        release.wait(PATIENCE_S)
        yield [good(0)]

    with Feed(batches(), 8, 100) as feed:
        assert list(feed.take(5)) == []
        feed.wait(0.0)
        assert not feed.exhausted
        release.set()
        feed.wait(PATIENCE_S)
        assert [request.id.index for request in feed.take(5)] == [0]


def test_window_is_bounded_by_rows() -> None:
    source = Source([[good(index)] for index in range(10)])
    with Feed(iter(source), max_rows=3, max_tokens=1_000) as feed:
        # the fourth batch is in the thread's hand, waiting for room
        assert source.reached[4].wait(PATIENCE_S)
        assert len(list(feed.take(10))) == 3
        assert source.reached[7].wait(PATIENCE_S)
        assert source.pulled <= 7


def test_window_is_bounded_by_tokens() -> None:
    source = Source([[good(index, tokens=4)] for index in range(6)])
    with Feed(iter(source), max_rows=100, max_tokens=10) as feed:
        assert source.reached[3].wait(PATIENCE_S)
        assert [request.id.index for request in feed.take(10)] == [0, 1]
        assert source.reached[5].wait(PATIENCE_S)
        assert source.pulled <= 5


def test_output_of_a_resumed_row_counts_as_tokens() -> None:
    resumed = Request(RowId("a", 0), [0], Sampling(max_new_tokens=9), output=[0] * 8)
    source = Source([[resumed], [good(1, tokens=2)], [good(2)]])
    with Feed(iter(source), max_rows=100, max_tokens=10) as feed:
        assert source.reached[2].wait(PATIENCE_S)
        assert [request.id.index for request in feed.take(10)] == [0]


def test_request_bigger_than_the_window_passes_alone() -> None:
    with Feed(iter([[good(0), good(1, tokens=50), good(2)]]), 100, 10) as feed:
        assert drain(feed) == ([0, 1, 2], [])


def test_rows_that_failed_fill_the_window_until_they_are_fetched() -> None:
    source = Source([[bad(index)] for index in range(10)])
    with Feed(iter(source), max_rows=3, max_tokens=10) as feed:
        assert source.reached[4].wait(PATIENCE_S)
        feed.wait(PATIENCE_S)
        assert [error.id.index for error in feed.errors()] == [0, 1, 2]
        assert drain(feed) == ([], [3, 4, 5, 6, 7, 8, 9])


@pytest.mark.parametrize("call", ["take", "wait", "errors", "exhausted"])
def test_failure_of_the_thread_is_raised_on_the_callers(call: str) -> None:
    def batches() -> Iterator[list[Item]]:
        yield []
        raise InfrastructureError("cannot read `a.parquet`")

    feed = Feed(batches(), 8, 100)
    feed.close()
    calls: dict[str, Callable[[], object]] = {
        "take": lambda: feed.take(1),
        "wait": lambda: feed.wait(PATIENCE_S),
        "errors": feed.errors,
        "exhausted": lambda: feed.exhausted,
    }
    with pytest.raises(InfrastructureError, match=r"a\.parquet"):
        calls[call]()


def test_failure_wakes_who_waits() -> None:
    release = threading.Event()

    def batches() -> Iterator[list[Item]]:
        yield []
        release.wait(PATIENCE_S)
        raise InfrastructureError("disk gone")

    with Feed(batches(), 8, 100) as feed:
        release.set()
        with pytest.raises(InfrastructureError, match="disk gone"):
            feed.wait(PATIENCE_S)


def test_close_stops_a_thread_that_waits_for_room() -> None:
    source = Source([[good(index)] for index in range(10)])
    with Feed(iter(source), max_rows=1, max_tokens=10):
        assert source.reached[2].wait(PATIENCE_S)
    assert source.closed.is_set()
    assert source.pulled == 2


def test_close_stops_a_thread_whose_source_polls() -> None:
    polled = threading.Event()
    closed = threading.Event()

    def batches() -> Iterator[list[Item]]:
        try:
            while True:
                polled.set()
                yield []
        finally:
            closed.set()

    with Feed(batches(), 8, 100):
        assert polled.wait(PATIENCE_S)
    assert closed.is_set()


def test_close_twice_is_close_once() -> None:
    feed = Feed(iter([[good(0)]]), 8, 100)
    feed.close()
    feed.close()


def test_case_V_first_request_is_there_before_one_percent_is_read(tmp_path: Path) -> None:
    rows = 200_000
    pq.write_table(pa.table({"prompt": pa.array(["Hello world"] * rows)}), tmp_path / "a.parquet")
    prompts = Prompts(
        byte_level(tmp_path / "model"),
        input=InputTable(path="a.parquet", prompt="prompt"),
        generation=GenerationTable(max_new_tokens=1),
        job_seed=0,
        max_model_len=100,
        base=tmp_path,
    )
    shards = find_shards("a.parquet", tmp_path)
    read = 0

    def batches() -> Iterator[list[Item]]:
        nonlocal read
        with Reader(shards, "prompt") as reader:
            for span in cut_spans(shards):
                for batch in reader.read(span):
                    read += len(batch)
                    yield prompts.encode(batch, {})

    with Feed(batches(), max_rows=512, max_tokens=1_000_000) as feed:
        feed.wait(PATIENCE_S)
        (first,) = feed.take(1)
        assert first.id == RowId("a.parquet", 0)
        assert read < rows / 100
    assert read < rows / 100


def test_a_feed_that_waits_for_others_is_exhausted_but_has_not_ended() -> None:
    more = threading.Event()

    def batches() -> Iterator[list[Item]]:
        yield [good(0)]
        yield []
        assert more.wait(PATIENCE_S)
        yield [good(1)]

    with Feed(batches(), max_rows=10, max_tokens=10) as feed:
        feed.wait(PATIENCE_S)
        assert [request.id.index for request in feed.take(5)] == [0]
        deadline_s = time.monotonic() + PATIENCE_S
        while not feed.exhausted:
            assert time.monotonic() < deadline_s
        assert not feed.ended
        more.set()
        feed.wait(PATIENCE_S)
        assert [request.id.index for request in feed.take(5)] == [1]
        while not feed.ended:
            feed.wait(PATIENCE_S)
            assert time.monotonic() < deadline_s


def test_rows_that_somebody_else_does_are_dropped_wherever_they_are() -> None:
    unwanted = {1}
    go_on = threading.Event()

    def batches() -> Iterator[list[Item]]:
        yield [good(index) for index in range(4)] + [bad(4), bad(5)]
        assert go_on.wait(PATIENCE_S)
        yield [good(6), good(7)]

    with Feed(batches(), 10, 10, lambda row: row.index not in unwanted) as feed:
        while not (errors := feed.errors()):
            feed.wait(PATIENCE_S)
        assert errors[0].id.index == 4
        unwanted |= {2, 7}
        feed.drop_unwanted()
        go_on.set()
        assert drain(feed)[0] == [0, 3, 6]


def test_a_feed_that_stops_admitting_is_exhausted_and_says_what_it_kept_back() -> None:
    with Feed(iter([[good(0), good(1), bad(2)]]), max_rows=9, max_tokens=9) as feed:
        feed.wait(PATIENCE_S)
        [first] = feed.take(1)
        assert (first.id.index, feed.exhausted, feed.left_over) == (0, False, False)
        feed.stop_admitting()
        feed.wait(PATIENCE_S)
        assert (feed.exhausted, feed.left_over, list(feed.take(5))) == (True, True, [])


def test_a_feed_that_has_handed_over_everything_keeps_nothing_back() -> None:
    with Feed(iter([[good(0)]]), max_rows=9, max_tokens=9) as feed:
        assert drain(feed) == ([0], [])
        feed.stop_admitting()
        assert (feed.exhausted, feed.left_over) == (True, False)


def test_who_waits_for_requests_is_told_that_no_more_are_admitted() -> None:
    never = threading.Event()

    def blocked() -> Iterator[list[Item]]:
        never.wait(PATIENCE_S)
        yield []

    with Feed(blocked(), max_rows=9, max_tokens=9) as feed:
        waiting = threading.Thread(target=feed.wait, args=(PATIENCE_S,))
        waiting.start()
        feed.stop_admitting()
        waiting.join(PATIENCE_S / 2)
        assert not waiting.is_alive()
        never.set()


def test_what_is_given_back_comes_first_again():
    with Feed(iter([[good(index) for index in range(5)]]), 5, 100) as feed:
        while len(taken := list(feed.take(5))) < 5:
            feed.give_back(taken)
            feed.wait(PATIENCE_S)
        feed.give_back(taken[2:])
        assert not feed.exhausted
        assert drain(feed) == ([2, 3, 4], [])


def test_what_is_given_back_to_a_feed_that_stopped_admitting_is_left_over():
    with Feed(iter([[good(0)]]), 5, 100) as feed:
        while not (taken := list(feed.take(1))):
            feed.wait(PATIENCE_S)
        feed.stop_admitting()
        feed.give_back(taken)
        assert list(feed.take(1)) == []
        assert (feed.exhausted, feed.left_over) == (True, True)
