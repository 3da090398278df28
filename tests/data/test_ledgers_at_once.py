"""Workers that share, stall, leave and die at any moment: every row once, and nothing is left."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobrunner.data import claims, ledger
from jobrunner.data.claims import STALE_S
from jobrunner.data.results.parts import Tally
from jobrunner.data.sharing import read_cuts
from jobrunner.records import Partial, RowId, Span
from tests.data.conftest import read_result
from tests.data.test_ledger import SHARD, Worker
from tests.properties import examples

# no process has such a number
_FIRST_PID = 2**30
MOST_ROUNDS = 300


class World:
    """A run directory, the workers that are at it, and the time, which only this moves."""

    def __init__(self, root: Path, cuts: list[int], workers: int) -> None:
        self.root = root
        self.spans = [Span(SHARD, *ends) for ends in pairwise(cuts)]
        self.rows = {SHARD: cuts[-1]}
        self.now_s = 0.0
        self.alive: set[int] = set()
        self._pids = _FIRST_PID
        self.hands = [self.hire() for _ in range(workers)]

    def hire(self) -> Hand:
        self._pids += 1
        self.alive.add(self._pids)
        return Hand(self, self._pids)

    def started(self, pid: int) -> int | None:
        """When a process began, as the claims see it."""
        return 1 if pid in self.alive else None


class Hand(Worker):
    """A worker with rows that it has read, that wait in its engine, and that run there."""

    now_s = property(lambda self: self.world.now_s, lambda self, seconds: None)

    def __init__(self, world: World, pid: int) -> None:
        self.world = world
        token = f"{pid:08x}"
        super().__init__(world.root, token, world.spans, world.rows, pid=pid, started=1)
        self.claims._clock = lambda: world.now_s
        self.read: deque[RowId] = deque()
        self.queued: list[RowId] = []
        self.running: dict[RowId, list[int]] = {}

    @property
    def idle(self) -> bool:
        return not (self.read or self.queued or self.running)

    def claim(self, dice: random.Random) -> None:
        assignment = next(self._assignments, None)
        if assignment is None:
            return
        span, saved = assignment.span, assignment.partials
        self.read.extend(
            RowId(SHARD, index)
            for index in range(span.start, span.stop)
            if index not in assignment.done
        )
        for partial in saved.values():
            assert set(partial.tokens) == {partial.id.index}, "tokens of another row"

    def begin(self, dice: random.Random) -> None:
        for _ in range(min(len(self.read), dice.randint(1, 4))):
            row = self.read.popleft()
            if self.ledger.wanted(row):
                self.ledger.begin([row])
                self.queued.append(row)

    def start(self, dice: random.Random) -> None:
        for _ in range(min(len(self.queued), dice.randint(1, 3))):
            row = self.queued.pop(dice.randrange(len(self.queued)))
            self.running[row] = []

    def step(self, dice: random.Random) -> None:
        for row, tokens in self.running.items():
            tokens.append(row.index)
        for row in dice.sample(list(self.running), dice.randint(0, len(self.running))):
            del self.running[row]
            self.answer(row.index)
        self.tick(dice)

    def tick(self, dice: random.Random) -> None:
        self.ledger.tick()

    def checkpoint(self, dice: random.Random) -> None:
        self.ledger.checkpoint(
            Partial(row, tuple(tokens), 1) for row, tokens in self.running.items() if tokens
        )

    def share(self, dice: random.Random) -> None:
        self.world.now_s += 1.0
        if self.ledger.share(idle=self.idle, take_back=self.take_back):
            self.read = deque(row for row in self.read if self.ledger.wanted(row))

    def take_back(self) -> None:
        self.ledger.unbegin(self.queued)
        self.read.extendleft(reversed(self.queued))
        self.queued.clear()

    def stall(self, dice: random.Random) -> None:
        """Let time pass in which nobody sees anything of anyone."""
        self.world.now_s += dice.choice([5.0, STALE_S / 2, STALE_S + 1])

    def leave(self, dice: random.Random) -> None:
        self.checkpoint(dice)
        self.ledger.__exit__(None)
        self.die(dice)

    def die(self, dice: random.Random) -> None:
        world, place = self.world, self.world.hands.index(self)
        world.alive.remove(self.identity.pid)
        world.hands[place] = world.hire()

    def round(self, dice: random.Random) -> None:
        """Do all that there is to do."""
        for do in (self.claim, self.begin, self.start, self.step, self.checkpoint, self.share):
            do(dice)


def at_once(merge: Callable[[], Tally]) -> Future[Tally]:
    """Merge without a thread, so that the same deeds always do the same."""
    done: Future[Tally] = Future()
    done.set_result(merge())
    return done


WHAT = "claim claim begin begin start start step step tick checkpoint share share stall leave die"


@examples(15)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    workers=st.integers(1, 3),
    deeds=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(WHAT.split())), max_size=80),
    seed=st.integers(0, 2**16),
)
def test_every_row_is_there_once_whatever_workers_do_to_each_other(sizes, workers, deeds, seed):
    dice, ends = random.Random(seed), [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        world = World(Path(folder), ends, workers)
        patch.setattr(claims, "_start_ticks", world.started)
        patch.setattr(ledger, "_in_background", at_once)
        # what a worker waits for when all is in its own hands
        patch.setattr(ledger, "POLL_S", 0.004)
        for place, what in deeds:
            getattr(world.hands[place % workers], what)(dice)
        for _ in range(MOST_ROUNDS):
            for hand in world.hands:
                hand.round(dice)
                world.now_s += 1.0
            if all(hand.progress.complete for hand in world.hands):
                break
        else:
            raise AssertionError("the job does not end")
        rows = read_result(world.hands[0].run, SHARD)
        assert [row["row"] for row in rows] == list(range(ends[-1]))
        assert [row["text"] for row in rows] == [f"answer {index}" for index in range(ends[-1])]
        for hand in world.hands:
            hand.ledger.__exit__(None)
        assert read_cuts(world.hands[0].run, SHARD) == []
