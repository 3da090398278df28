"""Keep the books of one worker: it joins progress, claims, results and partials.

Knows nothing of where rows come from or who answers them. The feed's thread claims spans while
the loop's thread books rows: a lock guards what both touch.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Self

from jobrunner.data.claims import HEARTBEAT_S, Claims
from jobrunner.data.intervals import Intervals
from jobrunner.data.layout import RunDirectory
from jobrunner.data.progress import (
    Progress,
    discard_partials,
    load_partials,
    partial_starts,
    save_partials,
)
from jobrunner.data.results.merge import compact
from jobrunner.data.results.parts import Results, Tally, discard_leftovers
from jobrunner.data.results.pending import is_merged
from jobrunner.data.results.samples import Answer, FinishedRow, Gathering
from jobrunner.data.sharing import Idlers, cut, pieces, read_cuts
from jobrunner.records import Completion, Partial, RowId, SampleId, Span

# how often a worker with nothing left to claim looks at what the others hold
POLL_S = 1.0
# how long a worker leaves what it gave away to others before it takes it back
GIVEN_S = 10.0


@dataclass(frozen=True, slots=True)
class Assignment:
    """A claimed span, its rows that are finished already, and those that were in flight."""

    span: Span
    done: Intervals
    partials: Mapping[SampleId, Partial]


class Ledger:
    """Claims spans, commits rows, saves partials, merges shards. Use it in a `with`.

    `merge` makes the result file of a shard whose rows are all in parts; it runs on a thread of
    its own, so that the device does not wait for the disk. `check_input` raises if a shard is
    not what it was: no answer to another text is committed.
    """

    def __init__(
        self,
        run: RunDirectory,
        claims: Claims,
        progress: Progress,
        results: Results,
        spans: Iterable[Span],
        merge: Callable[[str], Tally],
        check_input: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._claims = claims
        self._progress = progress
        self._results = results
        self._gathering = Gathering()
        self._spans = list(spans)
        self._merge = merge
        self._check_input = check_input
        self._held: dict[Span, Assignment] = {}
        self._waiting: deque[Span] = deque()
        # rows from here on are not begun, by held span
        self._frontiers: dict[Span, int] = {}
        # spans that this worker gave away, and when; of `_given` a new tuple is made each time, so
        # that it can be read without the lock
        self._left: list[tuple[float, Span]] = []
        self._given: tuple[Span, ...] = ()
        self._idlers = Idlers(run)
        self._shared_s = -math.inf
        self._let_go_of_one = threading.Event()
        self._lock = threading.RLock()
        self._merging: tuple[str, Future[Tally]] | None = None
        self._clock = clock
        self._heartbeat_s = clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if self._merging is not None and kind is None:
                self._merging[1].result()
        finally:
            self._idlers.hide()
            self._claims.release_all()

    def assignments(self, stopped: Callable[[float], bool]) -> Iterator[Assignment | None]:
        """Claim one span after the other until every row is done.

        Waits for spans that others hold, yielding None now and then, and takes over what is
        abandoned. `stopped(seconds)` sleeps and tells whether to give up.
        """
        with self._lock:
            self._waiting = self._cut_up(self._spans)
        while True:
            claimed = False
            for span in self._round():
                assignment = self._claim(span)
                if assignment is not None:
                    claimed = True
                    yield assignment
                elif not self._is_done(span):
                    self._waiting.append(span)
            if claimed:
                continue
            with self._lock:
                if not (self._waiting or self._left or self._held):
                    return
            yield None
            if stopped(0.0) or self._rest(stopped):
                return
            self._look_again({span.shard for span in self._waiting})
            with self._lock:
                self._waiting = self._cut_up(self._waiting)

    def _round(self) -> Iterator[Span]:
        """Every span that waits, once, and those that nobody took of what was given away."""
        with self._lock:
            now_s = self._clock()
            self._waiting.extend(span for given_s, span in self._left if now_s >= given_s + GIVEN_S)
            self._left = [entry for entry in self._left if now_s < entry[0] + GIVEN_S]
            count = len(self._waiting)
        for _ in range(count):
            yield self._waiting.popleft()

    def _rest(self, stopped: Callable[[float], bool]) -> bool:
        """Wait until it makes sense to look again; tell whether to give up."""
        if self._waiting:
            return stopped(POLL_S)
        # all that is left is in this worker's hands, or was
        self._let_go_of_one.wait(POLL_S / 4)
        self._let_go_of_one.clear()
        return stopped(0.0)

    def begin(self, rows: Iterable[RowId]) -> None:
        """Take note that rows go to the engine: they are not given away any more."""
        with self._lock:
            for row in rows:
                for span in self._held:
                    if span.shard == row.shard and span.start <= row.index < span.stop:
                        begun = self._frontiers.get(span, span.start)
                        self._frontiers[span] = max(begun, row.index + 1)

    def unbegin(self, rows: Iterable[RowId]) -> None:
        """Take note that rows came back from the engine as they went there."""
        returned = set(rows)
        with self._lock:
            for span, begun in self._frontiers.items():
                while begun > span.start and RowId(span.shard, begun - 1) in returned:
                    begun -= 1
                self._frontiers[span] = begun

    def wanted(self, row: RowId) -> bool:
        """Tell whether a row is still this worker's to do."""
        return not any(
            span.shard == row.shard and span.start <= row.index < span.stop for span in self._given
        )

    def share(self, *, idle: bool, take_back: Callable[[], None]) -> bool:
        """Give rows that are not begun to workers that have nothing to do; tell whether it did.

        `idle` says that this worker's engine could take more rows and gets none; `take_back` has
        it give up those that only wait there, and calls `unbegin`. Cheap, for every step.
        """
        now_s = self._clock()
        if now_s - self._shared_s < POLL_S:
            return False
        self._shared_s = now_s
        with self._lock:
            if idle and not self._all_unbegun():
                self._idlers.show()
                return False
            self._idlers.hide()
            others = self._idlers.count() if self._held else 0
        if not others:
            return False
        take_back()
        with self._lock:
            unbegun = self._all_unbegun()
            left = sum(len(rows) for rows in unbegun.values())
            return self._give(unbegun, left * others // (others + 1), others)

    def _all_unbegun(self) -> dict[Span, range]:
        return {span: rows for span in self._held if (rows := self._unbegun(span))}

    def _unbegun(self, span: Span) -> range:
        """The rows at the end of a held span that nobody has begun."""
        begun = max(
            self._frontiers.get(span, span.start),
            *(saved.id.index + 1 for saved in self._held[span].partials.values()),
            span.start,
        )
        done = self._progress[span.shard].done
        # a part of it may be done: where that is at its beginning, or its end, is nothing to give
        while begun < span.stop and begun in done:
            begun += 1
        return range(begun, span.stop)

    def _give(self, unbegun: Mapping[Span, range], rows: int, others: int) -> bool:
        """Cut so many rows off the ends of held spans, in a piece for each of the others."""
        size = -(-rows // others)
        gave = False
        for span, free in reversed(list(unbegun.items())):
            taken = min(rows, len(free))
            rows -= taken
            if taken:
                start = span.stop - taken
                cuts = [row for row in range(start, span.stop, size) if row > span.start]
                for row in cuts:
                    cut(self._run, span.shard, row)
                self._leave(span, start, list(pieces(Span(span.shard, start, span.stop), cuts)))
                gave = True
        return gave

    def _leave(self, span: Span, stop: int, given: list[Span]) -> None:
        """Hold a span only up to `stop`; the rest is anybody's."""
        assignment, begun = self._held.pop(span), self._frontiers.pop(span, span.start)
        if stop > span.start:
            shorter = span._replace(stop=stop)
            self._held[shorter] = replace(assignment, span=shorter)
            self._frontiers[shorter] = begun
        else:
            self._claims.release(_span_claim(span))
        self._given += tuple(given)
        self._left += [(self._clock(), piece) for piece in given]

    def _cut_up(self, spans: Iterable[Span]) -> deque[Span]:
        """Spans as they are cut by now, in their order."""
        cuts: dict[str, list[int]] = {}
        found: deque[Span] = deque()
        for span in spans:
            if span.shard not in cuts:
                cuts[span.shard] = read_cuts(self._run, span.shard)
            found.extend(pieces(span, cuts[span.shard]))
        return found

    def saved(self) -> tuple[int, int]:
        """Count the rows that earlier workers left in flight, and their tokens.

        Looks only at spans that have a file: a large input has many spans and few in flight.
        """
        shards = {span.shard for span in self._spans}
        starts = {shard: partial_starts(self._run, shard) for shard in shards}
        begun = self._cut_up(span for span in self._spans if starts[span.shard])
        spans = [span for span in begun if span.start in starts[span.shard]]
        partials = [p for span in spans for p in self._unfinished(span).values()]
        return len({p.id for p in partials}), sum(len(p.tokens) for p in partials)

    def finish(
        self, completion: Completion, text: str | None, prompt_text: str | None = None
    ) -> FinishedRow | None:
        """Take a finished sample; return its row if this was the last sample of it.

        A finished row is final after the next checkpoint.
        """
        row = self._gathering.add(Answer(completion, text, prompt_text))
        if row is not None:
            self._results.add(row)
        return row

    @property
    def full(self) -> bool:
        """Enough finished rows wait for a checkpoint."""
        return self._results.full

    @property
    def empty(self) -> bool:
        """No finished row waits for a checkpoint."""
        return not self._results.shards

    def checkpoint(self, in_flight: Iterable[Partial]) -> None:
        """Commit what is finished, save what is in flight, let go of spans that are done.

        A finished sample whose row has others in flight is saved with them.
        """
        for shard in self._results.shards:
            self._check_input(shard)
        committed = self._results.commit(self._keep_alive)
        partials: dict[str, list[Partial]] = defaultdict(list)
        for saved in chain(in_flight, self._gathering.partials()):
            partials[saved.id.shard].append(saved)
        for shard in committed:
            compact(self._run, shard)
            self._keep_alive()
        with self._lock:
            self._progress.mark_done(committed)
            for shard in committed:
                if is_merged(self._run, shard):
                    # others finished the shard while this worker was stopped
                    self._progress.refresh(shard)
                    discard_leftovers(self._run, shard)
            for span in list(self._held):
                if self._progress.is_done(span):
                    self._let_go(span)
                else:
                    self._save(span, partials[span.shard])
                self._keep_alive()
            self._claims.heartbeat()
            self._start_merge()

    def tick(self) -> list[str]:
        """Show that this worker is alive, and name the shard that it has merged since, if any.

        Cheap, for every step. Raises what a merge raised.
        """
        self._keep_alive()
        if self._merging is None or not self._merging[1].done():
            return []
        (shard, merge), self._merging = self._merging, None
        merge.result()
        with self._lock:
            self._progress.refresh(shard)
            self._claims.release(_merge_claim(shard))
            self._start_merge()
        return [shard]

    def _keep_alive(self) -> None:
        """Give a heartbeat if it is time; also between files of a checkpoint: disks are slow."""
        now_s = self._clock()
        if now_s - self._heartbeat_s > HEARTBEAT_S:
            self._heartbeat_s = now_s
            with self._lock:
                self._claims.heartbeat()

    def settle(self, stopped: Callable[[float], bool]) -> Iterator[list[str]]:
        """After the last row: merge what is left, and wait for what other workers merge.

        Yields, now and then, the names of the shards that this worker has merged since.
        """
        while True:
            yield self.tick()
            if self._progress.complete and self._merging is None:
                return
            if self._merging is not None:
                futures.wait([self._merging[1]], timeout=POLL_S)
                continue
            self._look_again(self._progress.unmerged)
            with self._lock:
                self._start_merge()
            if self._merging is None and not self._progress.complete and stopped(POLL_S):
                return

    def _claim(self, span: Span) -> Assignment | None:
        with self._lock:
            if self._progress.is_done(span) or not self._claims.acquire(_span_claim(span)):
                return None
            # who held it may have cut it meanwhile
            span, *others = self._cut_up([span])
            self._waiting.extend(others)
            self._given = tuple(piece for given in self._given for piece in _outside(given, span))
            # a copy: the feed's thread reads it while this worker's rows are booked
            done = Intervals(self._progress.refresh(span.shard).done)
            assignment = Assignment(span, done, self._unfinished(span))
            self._held[span] = assignment
            if self._progress.is_done(span):
                self._let_go(span)
                return None
            return assignment

    def _unfinished(self, span: Span) -> dict[SampleId, Partial]:
        """The saved tokens of the rows of a span that are not done."""
        done = self._progress[span.shard].done
        partials = load_partials(self._run, span)
        return {sample: saved for sample, saved in partials.items() if saved.id.index not in done}

    def _let_go(self, span: Span) -> None:
        discard_partials(self._run, span)
        self._claims.release(_span_claim(span))
        del self._held[span]
        self._frontiers.pop(span, None)
        self._let_go_of_one.set()
        if not self._progress[span.shard].all_done:
            # others may have done the rest
            self._progress.refresh(span.shard)

    def _start_merge(self) -> None:
        """Merge in the background a shard whose rows are all done and that nobody merges."""
        for shard in self._progress.unmerged:
            if self._merging is not None:
                return
            if not self._progress[shard].all_done:
                continue
            if not self._claims.acquire(_merge_claim(shard)):
                continue
            # others may have merged it, or made its error rows run again
            known = self._progress.refresh(shard)
            if known.merged or not known.all_done:
                self._claims.release(_merge_claim(shard))
            else:
                self._merging = (shard, _in_background(partial(self._merge, shard)))

    def _save(self, span: Span, partials: list[Partial]) -> None:
        """Save the rows in flight, and those that an earlier worker had in flight as it left them.

        The latter wait in the window or are not read again yet.
        """
        done = self._progress[span.shard].done
        mine = (p for p in partials if span.start <= p.id.index < span.stop)
        current = {SampleId(p.id, p.sample): p for p in mine}
        before = self._held[span].partials.items()
        saved = {sample: p for sample, p in before if p.id.index not in done}
        save_partials(self._run, span, list((saved | current).values()))
        discard_partials(self._run, span, keep_mine=True)

    def _is_done(self, span: Span) -> bool:
        with self._lock:
            return self._progress.is_done(span)

    def _look_again(self, shards: Iterable[str]) -> None:
        with self._lock:
            self._claims.heartbeat()
            for shard in shards:
                self._progress.refresh(shard)


def _in_background(merge: Callable[[], Tally]) -> Future[Tally]:
    """Run a merge on a thread that does not keep the process alive: a merge may be cut off."""
    future: Future[Tally] = Future()

    def run() -> None:
        try:
            future.set_result(merge())
        except BaseException as error:  # noqa: BLE001 - raised again by whoever asks
            future.set_exception(error)

    threading.Thread(target=run, name="merge", daemon=True).start()
    return future


def _outside(given: Span, claimed: Span) -> Iterator[Span]:
    """What is left of a span without the rows of another."""
    if given.shard != claimed.shard:
        yield given
        return
    for start, stop in (
        (given.start, min(given.stop, claimed.start)),
        (max(given.start, claimed.stop), given.stop),
    ):
        if start < stop:
            yield Span(given.shard, start, stop)


def _span_claim(span: Span) -> str:
    return f"spans/{span.shard}/{span.start:012d}"


def _merge_claim(shard: str) -> str:
    return f"merges/{shard}/merge"
