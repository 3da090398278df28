"""Lanes of a device that is never quicker than it must be. Know which work comes before which.

Each lane counts its work, and knows how far the others must have got before its next work begins.
So does the host, which learns it when a mark that it asks about has passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from jobrunner.engine.streams import Lane

Clock = dict[Lane, int]
# a block of a pool, or a place in host memory
Place = tuple[str, int, int]


def later(one: Clock, other: Clock) -> Clock:
    return {lane: max(one[lane], other[lane]) for lane in Lane}


@dataclass(frozen=True)
class Work:
    """Something that a device does: its place in its lane, and what is surely done before it."""

    what: str
    lane: Lane
    after: Clock
    reads: frozenset[Place]
    writes: frozenset[Place]

    def touches(self, other: Work) -> bool:
        """Whether the order of the two matters."""
        return bool(self.writes & (other.reads | other.writes) or self.reads & other.writes)

    def surely_before(self, other: Work) -> bool:
        return other.after[self.lane] >= self.after[self.lane]


class FakeMark:
    def __init__(self, streams: FakeStreams, clock: Clock) -> None:
        self.clock = clock
        self._streams = streams

    @property
    def passed(self) -> bool:
        self._streams.asked = self
        return later(self.clock, self._streams.host) == self._streams.host

    def since(self, earlier: FakeMark) -> float:
        assert self.passed, "nobody knows yet when that is"
        assert earlier.passed, "nobody knows yet when that was"
        return float(sum(self.clock.values()) - sum(earlier.clock.values()))


class FakeStreams:
    """Lets a mark pass only when the host sleeps after having asked about it.

    `events` tells what the host did, `work` what the device was given. With `deaf` no lane is ever
    held: a test of the tests.
    """

    def __init__(self, *, deaf: bool = False) -> None:
        self.host: Clock = dict.fromkeys(Lane, 0)
        self.events: list[str] = []
        self.work: list[Work] = []
        self.asked: FakeMark | None = None
        self._deaf = deaf
        self._lane = Lane.COMPUTE
        self._clocks: dict[Lane, Clock] = {lane: dict.fromkeys(Lane, 0) for lane in Lane}

    @contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        before, self._lane = self._lane, lane
        try:
            yield
        finally:
            self._lane = before

    def mark(self, lane: Lane) -> FakeMark:
        return FakeMark(self, dict(self._clocks[lane]))

    def hold(self, lane: Lane, mark: Any) -> None:
        self.events.append(f"hold {lane.value}")
        if not self._deaf:
            self._clocks[lane] = later(self._clocks[lane], mark.clock)

    def does(self, what: str, reads: Iterable[Place] = (), writes: Iterable[Place] = ()) -> None:
        """Give the device something to do in the lane that is on."""
        lane = self._lane
        clock = later(self._clocks[lane], self.host)
        clock[lane] += 1
        self._clocks[lane] = clock
        self.events.append(f"{lane.value}: {what}")
        self.work.append(Work(what, lane, dict(clock), frozenset(reads), frozenset(writes)))

    def sleep(self, seconds: float) -> None:
        """The host waits for what it asked about last: now the device gets there."""
        assert self.asked is not None
        self.events.append("wait")
        self.host = later(self.host, self.asked.clock)

    def check(self) -> None:
        """Raise AssertionError where two pieces of work could run in the other order."""
        for index, second in enumerate(self.work):
            for first in self.work[:index]:
                if first.touches(second):
                    assert first.surely_before(second), f"{second.what} may overtake {first.what}"


@pytest.fixture
def fake_streams(monkeypatch: pytest.MonkeyPatch) -> FakeStreams:
    """Lanes whose device gets on when somebody waits."""
    return waited_for(FakeStreams(), monkeypatch)


def waited_for(streams: FakeStreams, monkeypatch: pytest.MonkeyPatch) -> FakeStreams:
    monkeypatch.setattr("jobrunner.engine.streams.sleep", streams.sleep)
    return streams
