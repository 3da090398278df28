"""Turn rows of known lengths into requests, by a clock that is moved. Knows no scheduler."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from jobrunner.records import Request, RowId, Sampling
from jobrunner.simulate.trace import TraceRow

# the token that ends a text, and any other
END, OTHER = 0, 1


class VirtualClock:
    """Seconds that pass only when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass, however little: what is too short for a float becomes the shortest."""
        if seconds > 0:
            self.now = max(self.now + seconds, math.nextafter(self.now, math.inf))


class VirtualRequests:
    """The requests of one worker: prompts without meaning, of the right lengths.

    Its rows stand at `places` of `rows`. With `max_new_tokens` nobody knows before when a row
    ends; without, each has its length as its limit and no token that could end it earlier. The
    first `shared_prefix` tokens of all prompts are the same, whatever follows differs.
    """

    def __init__(
        self,
        rows: Sequence[TraceRow],
        places: range,
        clock: VirtualClock,
        max_new_tokens: int | None,
        shared_prefix: int,
    ) -> None:
        self._rows = rows
        self._places = places
        self._clock = clock
        self._sampling: Sampling | None = None
        if max_new_tokens is not None:
            self._sampling = Sampling(max_new_tokens, stop_ids=frozenset({END}))
        self._shared_prefix = shared_prefix
        self._taken = 0

    @property
    def exhausted(self) -> bool:
        """Nothing is left and nothing will come."""
        return self._taken == len(self._places)

    def take(self, limit: int) -> list[Request]:
        """Hand over the next requests, at most `limit`, whenever they arrive."""
        places = self._places[self._taken : self._taken + limit]
        self._taken += len(places)
        return [self._request(place) for place in places]

    def wait(self, timeout_s: float) -> None:
        """Let time pass."""
        self._clock.advance(timeout_s)

    def _request(self, place: int) -> Request:
        row = self._rows[place]
        prompt = array("q", bytes(8 * row.prompt))
        if row.prompt > self._shared_prefix:
            prompt[self._shared_prefix] = place + 1
        return Request(
            RowId("trace", place),
            prompt,
            self._sampling or Sampling(row.output),
            priority=row.priority,
            arrival_s=row.arrival_s,
        )
