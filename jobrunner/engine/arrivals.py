"""Hold requests back until they arrive. Knows nothing of the engine that serves them."""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from jobrunner.records import Request, Requests

# rows read ahead of their arrival
_HELD_ROWS = 10_000


def poisson_arrivals(rate_per_s: float, seed: int) -> Iterator[float]:
    """Yield the seconds at which a Poisson process of a rate has its events, without end.

    The gaps are exponential with a mean of 1 / rate.
    """
    if rate_per_s <= 0:
        raise ValueError(f"a rate of {rate_per_s} per second has no arrivals")
    draws = random.Random(seed)
    at_s = 0.0
    while True:
        at_s += draws.expovariate(rate_per_s)
        yield at_s


class Arrivals:
    """A source of requests that hands over none before its time.

    Time counts from the first `take`. Of those that have arrived, lower bands come first. A
    request is handed over with its arrival on the engine's `clock`, so that waiting outside a full
    window is waiting too. Rows are read ahead up to `held_rows`: one that stands in the input
    further behind those that arrive after it comes late.
    """

    def __init__(
        self,
        requests: Requests,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        held_rows: int = _HELD_ROWS,
    ) -> None:
        self._requests = requests
        self._clock = clock
        self._sleep = sleep
        self._held_rows = held_rows
        self._started: float | None = None
        self._read = 0
        self._coming: list[tuple[float, int, Request]] = []
        self._arrived: list[tuple[int, float, int, Request]] = []

    @property
    def exhausted(self) -> bool:
        """Nothing is held back and nothing will come."""
        return not self._coming and not self._arrived and self._requests.exhausted

    def take(self, limit: int) -> Iterable[Request]:
        """Hand over at most `limit` requests that have arrived; never blocks."""
        if self._started is None:
            self._started = self._clock()
        self._read_ahead()
        self._receive(self._clock() - self._started)
        count = min(limit, len(self._arrived))
        taken = [heapq.heappop(self._arrived)[-1] for _ in range(count)]
        return [replace(r, arrival_s=self._started + r.arrival_s) for r in taken]

    def wait(self, timeout_s: float) -> None:
        """Return when a request has arrived, all is exhausted, or the time is up."""
        if self._arrived or self.exhausted:
            return
        if self._coming and self._started is not None:
            due_s = self._started + self._coming[0][0] - self._clock()
            timeout_s = max(0.0, min(timeout_s, due_s))
        if self._requests.exhausted or self._room() == 0:
            self._sleep(timeout_s)
        else:
            self._requests.wait(timeout_s)

    def _room(self) -> int:
        return self._held_rows - len(self._coming) - len(self._arrived)

    def _read_ahead(self) -> None:
        for request in self._requests.take(self._room()):
            heapq.heappush(self._coming, (request.arrival_s, self._read, request))
            self._read += 1

    def _receive(self, passed_s: float) -> None:
        while self._coming and self._coming[0][0] <= passed_s:
            at_s, number, request = heapq.heappop(self._coming)
            heapq.heappush(self._arrived, (request.priority, at_s, number, request))
