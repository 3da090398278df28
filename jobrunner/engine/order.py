"""Put new rows into the order in which they start. Knows no slots, no bands and no clock."""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, takewhile
from typing import Any, Literal, Protocol

from jobrunner.engine.sequence import Sequence
from jobrunner.records import Request

# prompts that are equal for so many blocks count as equal
_MOST_BLOCKS = 256
# of dead entries, before a line is built anew
_MOST_DEAD = 64
# times the mean number of steps: such a row is a long one
_LONG = 3.0
# mean prompts
_MOST_AHEAD = 4.0
# of the last rows, that go before those who are left are ranked anew
_FEWEST_RANKED = 16

# key, number, whose it is
_Entry = tuple[Any, int, Sequence]


class Predictor(Protocol):
    """Expects how many tokens a request will generate."""

    def expect(self, request: Request) -> float: ...

    def longest(self, request: Request) -> float:
        """Return how many only few of such requests get beyond."""


class Order(Protocol):
    """A queue with a next one, from which anyone may be removed."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]: ...

    def add(self, sequence: Sequence) -> None: ...

    def first(self) -> Sequence | None:
        """Return who is next, without removing it; None if nobody is there."""

    def remove(self, sequence: Sequence) -> None: ...

    def last(self) -> Order:
        """Return the order of those who are there, for when nobody else is known to come."""


class Line:
    """Sequences by key, those of one key in the order in which they came.

    Who comes with the highest key of all stands behind the others in a queue, as most do; only
    others go into a heap. Whoever was removed stays in either until it comes up or until such are
    the most.
    """

    def __init__(self) -> None:
        self._queue: deque[_Entry] = deque()
        self._heap: list[_Entry] = []
        self._entries: dict[Sequence, _Entry] = {}
        self._added = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._entries)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._entries

    def add(self, sequence: Sequence, key: Any) -> None:
        self._entries[sequence] = entry = (key, self._added, sequence)
        self._added += 1
        if self._queue and key < self._queue[-1][0]:
            heapq.heappush(self._heap, entry)
        else:
            self._queue.append(entry)

    def key(self, sequence: Sequence) -> Any:
        return self._entries[sequence][0]

    def first(self) -> Sequence | None:
        queue, heap, entries = self._queue, self._heap, self._entries
        while queue and entries.get(queue[0][2]) is not queue[0]:
            queue.popleft()
        while heap and entries.get(heap[0][2]) is not heap[0]:
            heapq.heappop(heap)
        if heap and not (queue and queue[0] < heap[0]):
            return heap[0][2]
        return queue[0][2] if queue else None

    def remove(self, sequence: Sequence) -> None:
        del self._entries[sequence]
        if len(self._queue) + len(self._heap) > 2 * len(self._entries) + _MOST_DEAD:
            self._queue = deque(sorted(self._entries.values()))
            self._heap.clear()


class Sorted:
    """The order of a key that is known when a row comes."""

    def __init__(self, key: Callable[[Sequence], Any]) -> None:
        self._key = key
        self._line = Line()

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._line)

    def add(self, sequence: Sequence) -> None:
        self._line.add(sequence, self._key(sequence))

    def first(self) -> Sequence | None:
        return self._line.first()

    def remove(self, sequence: Sequence) -> None:
        self._line.remove(sequence)

    def last(self) -> Order:
        return self


class InputOrder(Sorted):
    """Who comes first starts first."""

    def __init__(self) -> None:
        super().__init__(lambda sequence: 0)


class PrefixOrder:
    """Rows with equal leading blocks start together; else who comes first starts first.

    Rows stand in the order of a walk through the tree of prefixes, whose branches are in the
    order in which they came. The walk goes on where it stands when rows come, and begins again
    at its end, so that no row is passed over for longer than a round.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._branches = _Branches()
        self._ahead = Line()
        self._behind = Line()
        self._place: tuple[int, ...] = ()
        # blocks of the row that started last: who has them too is to be next
        self._started: list[bytes] = []

    def __len__(self) -> int:
        return len(self._ahead) + len(self._behind)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._ahead
        yield from self._behind

    def add(self, sequence: Sequence) -> None:
        place = self._branches.enter(self._digests(sequence))
        line = self._ahead if place >= self._place else self._behind
        line.add(sequence, place)

    def first(self) -> Sequence | None:
        if not self._ahead:
            self._ahead, self._behind = self._behind, self._ahead
            self._place = ()
        return self._ahead.first()

    def remove(self, sequence: Sequence) -> None:
        gone = self._digests(sequence)
        if sequence is self._ahead.first():
            self._place = self._ahead.key(sequence)
            gone, self._started = self._started, gone
        (self._ahead if sequence in self._ahead else self._behind).remove(sequence)
        self._branches.leave(gone)

    def last(self) -> Order:
        return self

    def _digests(self, sequence: Sequence) -> list[bytes]:
        return _digests(sequence, self._block_size)


def _digests(sequence: Sequence, block_size: int) -> list[bytes]:
    return sequence.chain(min(_MOST_BLOCKS, sequence.prompt_length // block_size), block_size)


class _Branches:
    """Numbers for the blocks of waiting rows, in the order in which they first came."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        # how many more rows that wait have the block than one. Whoever has a block has those in
        # front of it, so along the blocks of a row this falls, to none
        self._others: dict[bytes, int] = {}
        self._next = 0

    def enter(self, digests: list[bytes]) -> tuple[int, ...]:
        """Return the numbers of the blocks of one more row."""
        numbers, others = self._numbers, self._others
        place = list[int]()
        for digest in digests:
            number = numbers.get(digest)
            if number is None:
                break
            others[digest] = others.get(digest, 0) + 1
            place.append(number)
        new = range(self._next, self._next + len(digests) - len(place))
        numbers.update(zip(digests[len(place) :], new, strict=True))
        self._next = new.stop
        return (*place, *new)

    def leave(self, digests: list[bytes]) -> None:
        """Forget the blocks that no other row has."""
        others = self._others
        for digest in digests:
            count = others.get(digest, 0)
            if not count:
                del self._numbers[digest]
            elif count == 1:
                del others[digest]
            else:
                others[digest] = count - 1


class AutoOrder:
    """Long rows first, both kinds of work in every step, equal prefixes together.

    1. A row that is expected to take over three times as many steps as rows take on the average
       goes before the others, the longest first: a long one that starts late would run on alone.
    2. The others stand on two sides: those with more prompt for their expected output than the
       average, and those with less. Next is one of the side that is behind, so that a step has
       both prompts to fill its tokens and outputs to fill its slots.
    3. On each side equal prefixes stand together (`PrefixOrder`), so that what they share is
       computed, and not yet forgotten, when they start.

    Where all rows look alike, only the third makes a difference. When nobody else comes, those who
    may get long go first (`LastOrder`).
    """

    def __init__(self, block_size: int, chunk_size: int, predictor: Predictor) -> None:
        self._block_size = block_size
        self._chunk_size = chunk_size
        self._predictor = predictor
        self._long = Line()
        self._prompt_heavy = PrefixOrder(block_size)
        self._output_heavy = PrefixOrder(block_size)
        # and the output that was expected when they came: what is expected later has changed for
        # all of them, and measures none against the others
        self._side: dict[Sequence, tuple[PrefixOrder, float]] = {}
        # of all rows
        self._rows = 0
        self._steps = 0.0
        # of those on the sides
        self._prompts = 0.0
        self._outputs = 0.0
        # prompt tokens beyond those that go with the output of the rows that have started
        self._prompts_ahead = 0.0

    def __len__(self) -> int:
        return len(self._long) + len(self._side)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._long
        yield from self._side

    def add(self, sequence: Sequence) -> None:
        prompt, output = sequence.prompt_length, self._output(sequence)
        steps = prompt / self._chunk_size + output
        self._rows += 1
        self._steps += steps
        if steps > _LONG * self._steps / self._rows:
            self._long.add(sequence, -steps)
            return
        self._prompts += prompt
        self._outputs += output
        heavy = prompt * self._outputs > output * self._prompts
        side = self._prompt_heavy if heavy else self._output_heavy
        self._side[sequence] = side, output
        side.add(sequence)

    def first(self) -> Sequence | None:
        if self._long:
            return self._long.first()
        sides = (self._prompt_heavy, self._output_heavy)
        behind, ahead = sides if self._prompts_ahead <= 0 else reversed(sides)
        return behind.first() or ahead.first()

    def remove(self, sequence: Sequence) -> None:
        if sequence in self._long:
            self._long.remove(sequence)
            return
        side, output = self._side.pop(sequence)
        side.remove(sequence)
        # the prompt that goes with so much output on the average
        usual = output * self._prompts / self._outputs
        ahead = self._prompts_ahead + sequence.prompt_length - usual
        # one side alone must not run up a debt that the other pays back later
        most = _MOST_AHEAD * self._prompts / self._rows
        self._prompts_ahead = max(-most, min(most, ahead))

    def last(self) -> Order:
        return LastOrder(self, self._block_size, self._predictor)

    def _output(self, sequence: Sequence) -> float:
        return max(1.0, self._predictor.expect(sequence.request))


class LastOrder:
    """Those who may get longest start first, equal prefixes together.

    While slots run empty, the job lasts as long as its longest row. So rows go by the mean and a
    length that few of their kind get beyond; while few of a kind are known, only the mean tells
    them from others. Rows of one prefix go by the longest of them, and among themselves likewise.
    What has been learnt meanwhile counts when a quarter has gone.
    """

    def __init__(
        self, sequences: Iterable[Sequence], block_size: int, predictor: Predictor
    ) -> None:
        self._block_size = block_size
        self._predictor = predictor
        # blocks of the row that started last: who has them too goes on
        self._started: list[bytes] = []
        self._rank(list(sequences))

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._line)

    def add(self, sequence: Sequence) -> None:
        digests = _digests(sequence, self._block_size)
        shared = takewhile(lambda digest: digest in self._shared, digests)
        own = -self._length(sequence), self._came
        self._came += 1
        self._line.add(sequence, (*(self._shared[digest] for digest in shared), own))

    def first(self) -> Sequence | None:
        return self._line.first()

    def remove(self, sequence: Sequence) -> None:
        if sequence is self._line.first():
            self._started = _digests(sequence, self._block_size)
        self._line.remove(sequence)
        self._until_ranked -= 1
        if self._until_ranked == 0:
            self._rank(list(self._line))

    def last(self) -> Order:
        return self

    def _length(self, sequence: Sequence) -> float:
        request = sequence.request
        return self._predictor.expect(request) + self._predictor.longest(request)

    def _rank(self, rows: list[Sequence]) -> None:
        chains = [_digests(sequence, self._block_size) for sequence in rows]
        holders = Counter(chain.from_iterable([self._started, *chains]))
        # where the rows of each shared block stand among those that have all before it in common
        self._shared = dict.fromkeys(self._started, (-math.inf, -1))
        for place, (sequence, digests) in enumerate(zip(rows, chains, strict=True)):
            longest = -self._length(sequence)
            for digest in takewhile(lambda digest: holders[digest] > 1, digests):
                most, first = self._shared.get(digest, (longest, place))
                self._shared[digest] = min(most, longest), first
        self._line, self._came = Line(), 0
        self._until_ranked = max(_FEWEST_RANKED, len(rows) // 4)
        for sequence in rows:
            self.add(sequence)


class MostTokens:
    """Expects that every text gets as long as it may."""

    def expect(self, request: Request) -> float:
        return request.sampling.max_new_tokens

    def longest(self, request: Request) -> float:
        return request.sampling.max_new_tokens


def order_named(
    name: Literal["auto", "input", "longest", "shortest", "prefix"],
    *,
    block_size: int,
    chunk_size: int,
    predictor: Predictor | None = None,
) -> Callable[[], Order]:
    """Return what makes a queue in the order that a job file names.

    `longest` and `shortest` go by the tokens of prompt and expected output.
    """
    expects = predictor or MostTokens()

    def work(sequence: Sequence) -> float:
        return sequence.prompt_length + expects.expect(sequence.request)

    orders: dict[str, Callable[[], Order]] = {
        "auto": lambda: AutoOrder(block_size, chunk_size, expects),
        "input": InputOrder,
        "longest": lambda: Sorted(lambda sequence: -work(sequence)),
        "shortest": lambda: Sorted(work),
        "prefix": lambda: PrefixOrder(block_size),
    }
    return orders[name]
