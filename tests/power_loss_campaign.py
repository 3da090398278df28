"""Lose power at the moments of a recorded run, look at what is left, and let the job finish.

Losses are drawn by a seed, or all of them are gone through: each prefix of the operations, and for
each the states of the disk that `Disk.after_each_loss` names. Those are checked once that are the
same to whoever reads them. They may differ in the log, and in how many claims, journals and
unfinished files there are of workers that ended with the power: each is looked at by itself, and
only to see whether it names its worker, before it is removed.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from jobrunner.data import claims
from jobrunner.data.intervals import Intervals
from jobrunner.data.progress import Progress
from jobrunner.data.results.parts import Results
from jobrunner.errors import ExitCode, JobError
from tests.power_loss import Disk, Event, Named, Recorder, Told, Tree, build
from tests.power_loss_worlds import SmallWorld

# what workers that ended with the power wrote for themselves, and what names such a worker
_UNREAD = (".cbjob/tmp/", ".cbjob/status/")
_NAMING = (".cbjob/claims/", ".cbjob/flights/")

_PARTS = ".cbjob/parts/"
_DEEDS = {_PARTS: "part", ".cbjob/partials/": "partial", "results/": "result"}


@dataclass(frozen=True, slots=True)
class Exhausted:
    """What a campaign went through, and what was wrong."""

    operations: int
    prefixes: int
    states: int
    distinct: int
    resumed: int
    failures: list[str]
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.operations:,} operations, {self.prefixes:,} prefixes, {self.states:,} states,"
            f" {self.distinct:,} distinct, {self.resumed:,} resumed,"
            f" {len(self.failures):,} failures, {self.seconds:.0f} s"
        )


class Campaign:
    """Losses of power at moments of a recorded run, and what becomes of the job after them.

    `finish` runs the job to its end, `expected` are its outcomes, `start` is the disk before the
    first event.
    """

    def __init__(
        self,
        world: SmallWorld,
        events: list[Event],
        finish: Callable[[], ExitCode],
        expected: dict[str, Any],
        start: Callable[[], Disk] = Disk,
    ) -> None:
        self._world, self.events, self._finish = world, events, finish
        self._expected, self._start = expected, start
        self._boots = itertools.count()

    def run(self, seed: int, looks: int, resumes: int) -> None:
        """Draw so many moments; look at what is committed, and at some finish the job."""
        draw = random.Random(seed)
        moments = sorted(draw.choices(range(len(self.events) + 1), k=looks))
        resumed = set(draw.sample(range(looks), resumes))
        disk, place = self._start(), 0
        for look, moment in enumerate(moments):
            while place < moment:
                disk.apply(self.events[place])
                place += 1
            problem = self._problem(disk.after_loss(draw), moment, resume=look in resumed)
            assert not problem, f"seed {seed}, look {look}, {problem}"
            assert look not in resumed or self._world.problems() == []

    def exhaust(self, drawn: int) -> Exhausted:
        """Go through every prefix and its states, so many drawn; finish each distinct one."""
        began_s = time.monotonic()
        draw = random.Random(0)
        # the last moment at which a state may be found is the one with most to keep
        losses: dict[frozenset[tuple[str, object]], tuple[Tree, int]] = {}
        disk, states = self._start(), 0
        for moment in range(len(self.events) + 1):
            if moment:
                disk.apply(self.events[moment - 1])
            for tree in disk.after_each_loss(draw, drawn):
                states += 1
                losses[frozenset(_as_read(tree))] = tree, moment
        problems = [self._problem(tree, moment, resume=True) for tree, moment in losses.values()]
        return Exhausted(
            operations=sum(not isinstance(event, Told) for event in self.events),
            prefixes=len(self.events) + 1,
            states=states,
            distinct=len(losses),
            resumed=len(problems),
            failures=[problem for problem in problems if problem],
            seconds=time.monotonic() - began_s,
        )

    def _problem(self, tree: Tree, moment: int, *, resume: bool) -> str:
        """What is wrong with what was left, or with what becomes of it; nothing if all is well."""
        build(tree, self._world.directory.root)
        where = f"after event {moment} {self.events[moment - 1 : moment]}"
        with another_boot(f"boot {next(self._boots)}"):
            try:
                lost = self._missing(committed_rows(self.events[:moment]))
                if lost:
                    return f"{where}: {lost} were committed and are lost"
                wrong = self._resumed() if resume else ""
            except (JobError, AssertionError) as error:
                wrong = f"{type(error).__name__}: {error}"
        return wrong and f"{where}: {wrong}"

    def _missing(self, committed: dict[str, Intervals]) -> dict[str, list[int]]:
        """The rows that were committed and are not there."""
        progress = Progress(self._world.directory, self._world.shards)
        lost = {
            shard: [row for a, b in rows for row in range(a, b) if row not in progress[shard].done]
            for shard, rows in committed.items()
        }
        return {shard: rows for shard, rows in lost.items() if rows}

    def _resumed(self) -> str:
        """Finish the job; tell what is wrong with it then."""
        exit_code = self._finish()
        if exit_code != self._world.expected_exit:
            return f"it ended with {exit_code}"
        if self._world.outcomes() != self._expected:
            return f"its results are {self._world.outcomes()}"
        return "; ".join(self._world.leftovers())


def record(
    world: SmallWorld, *lives: Callable[[], object], disk: Disk | None = None
) -> list[Event]:
    """Record what some lives of a job do to its files."""
    recorder = Recorder(world.directory.root, disk)
    with recorder.recording(), _told(recorder):
        for life in lives:
            life()
    return recorder.events


def committed_rows(events: Iterable[Event]) -> dict[str, Intervals]:
    """What had been told to be committed, by shard."""
    rows: dict[str, Intervals] = {}
    for event in events:
        if isinstance(event, Told):
            for shard, ranges in event.what.items():
                rows.setdefault(shard, Intervals()).update(Intervals(tuple(one) for one in ranges))
    return rows


def deeds(events: Iterable[Event]) -> set[str]:
    """What a run did with its files, as far as a campaign should have met it."""
    found, disk = set(), Disk()
    before = disk.tree()
    for event in events:
        disk.apply(event)
        if isinstance(event, Named):
            after = disk.tree()
            for path in after.keys() - before.keys():
                found |= {deed for folder, deed in _DEEDS.items() if path.startswith(folder)}
            merged = any(path.startswith("results/") and after[path] is not None for path in after)
            if not merged and any(path.startswith(_PARTS) for path in before.keys() - after.keys()):
                found.add("merged some parts")
            before = after
    return found


@contextmanager
def _told(recorder: Recorder) -> Iterator[None]:
    """Let the recorder know what workers hear is committed."""
    real = Results.commit

    def commit(self: Results, *arguments: Any) -> dict[str, Intervals]:
        committed = real(self, *arguments)
        recorder.tell({shard: list(rows) for shard, rows in committed.items()})
        return committed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Results, "commit", commit)
        yield


@contextmanager
def another_boot(name: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claims, "_boot_id", lambda: name)
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def _as_read(tree: Tree) -> Iterator[tuple[str, object]]:
    """A tree as whoever goes on reads it."""
    for path, content in tree.items():
        if path.startswith(_UNREAD):
            yield "unread", True
        elif path.startswith(_NAMING):
            if content is not None:
                # a torn first line names nobody
                yield "naming", content.partition(b"\n")[0].strip()[-1:] in (b"]", b"}")
        elif path != "log.txt":
            yield path, content
