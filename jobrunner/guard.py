"""Hand rows to the engine so that one that kills its worker is found, and the others go on.

Rows that were there when a worker died wait until nothing else is left; then they run in small
groups, and at last alone. Knows nothing of files, texts or what the engine does.
"""

from __future__ import annotations

from collections.abc import Iterable

from jobrunner.data.feed import Feed
from jobrunner.data.ledger import Ledger
from jobrunner.data.suspects import ALONE, FEW, Flight, Suspects
from jobrunner.records import Completion, Request, RowError, RowId


class Guard:
    """A source of requests in front of a feed; it tells the ledger and the flight what begins."""

    def __init__(self, feed: Feed, ledger: Ledger, flight: Flight, suspects: Suspects) -> None:
        self._feed = feed
        self._ledger = ledger
        self._flight = flight
        self._suspects = suspects
        self._held: dict[RowId, list[Request]] = {}
        self._guilty: dict[RowId, Completion] = {}
        self._told: set[RowId] = set()
        self._apart = False
        self._admitting = True

    @property
    def exhausted(self) -> bool:
        """Nothing is ready; rows that run apart are not joined by others."""
        return self._feed.exhausted and (self._in_group or not self._may_group)

    @property
    def ended(self) -> bool:
        """No request is left and none will come."""
        return self._feed.ended and not self._may_group

    @property
    def left_over(self) -> bool:
        """`stop_admitting` kept back requests, or may have."""
        return self._feed.left_over or (not self._admitting and bool(self._held))

    @property
    def wants_more(self) -> bool:
        """The feed has nothing, and what comes later would still be begun."""
        return self._admitting and self._feed.exhausted

    def stop_admitting(self) -> None:
        """Hand over no more requests, suspect or not: the engine ends those that it has begun."""
        self._admitting = False
        self._feed.stop_admitting()

    def take_back(self, requests: Iterable[Request]) -> None:
        """Take back what the engine has not begun."""
        returned = list(requests)
        self._flight.end(request.id for request in returned)
        self._feed.give_back(returned)
        # of a row with several samples others may run
        self._ledger.unbegin(request.id for request in returned if request.samples == 1)

    def take(self, limit: int) -> Iterable[Request]:
        """Hand over at most `limit` requests; of suspect rows only a group, when all else is done.

        A row is handed over whole: where it has several samples they may be more than `limit`.
        """
        if self._in_group:
            return []
        taken = list(self._feed.take(limit))
        if taken:
            self._ledger.begin(request.id for request in taken)
        requests = [request for request in taken if not self._keeps(request)]
        if not taken and self._may_group and self._flight.empty:
            requests = self._group()
            self._apart = True
        elif requests:
            self._apart = False
        self._flight.begin((request.id, len(request.output)) for request in requests)
        return requests

    def wait(self, timeout_s: float) -> None:
        """Return when something may be ready, or the time is up."""
        if not self._may_group or self._in_group:
            self._feed.wait(timeout_s)

    def errors(self) -> list[Completion]:
        """Hand over the rows that failed in preparation, or that kill whoever runs them."""
        guilty = [row for row in self._guilty if row not in self._told]
        self._told.update(guilty)
        return [*self._feed.errors(), *(self._guilty[row] for row in guilty)]

    def finish(self, completions: Iterable[Completion]) -> None:
        """Take note of what the engine has finished."""
        self._flight.end(completion.id for completion in completions)

    @property
    def _may_group(self) -> bool:
        return self._admitting and bool(self._held)

    @property
    def _in_group(self) -> bool:
        return self._apart and not self._flight.empty

    def _keeps(self, request: Request) -> bool:
        """Keep a suspect row back, or call it an error."""
        suspicion = self._suspects.suspicion(request.id)
        if suspicion is None or suspicion.weight < FEW:
            return False
        if suspicion.guilty:
            message = f"{request.id}: its worker died {suspicion.deaths} times while it ran"
            self._guilty[request.id] = Completion(
                request.id, error=RowError("internal", message), request=None
            )
        else:
            self._held.setdefault(request.id, []).append(request)
        return True

    def _group(self) -> list[Request]:
        """The rows that run together next: those that weigh least, few of them, or one alone."""
        order = sorted(self._held, key=self._weight)
        few = [row for row in order if self._weight(row) < ALONE][: self._suspects.few()]
        return [request for row in few or order[:1] for request in self._held.pop(row)]

    def _weight(self, row: RowId) -> int:
        suspicion = self._suspects.suspicion(row)
        return 0 if suspicion is None else suspicion.weight
