"""Know which blocks of prompts are being computed, and who waits for them. Knows no memory."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq

from jobrunner.engine.sequence import Sequence


class Prefixes:
    """Blocks of prompts that a running sequence computes at this moment, by digest.

    A sequence whose prompt goes on with such a block waits for the last of them that it shares,
    instead of computing all of them again beside the other one. It waits for no longer than the
    other one needs for its prompt, which the device is busy with all the while.
    """

    def __init__(self) -> None:
        self._computing: dict[bytes, Sequence] = {}
        self._held: dict[bytes, list[Sequence]] = {}
        # by priority; no band is empty
        self._ready: dict[int, deque[Sequence]] = {}
        # those held and those ready, by priority
        self._bands = Counter[int]()

    def __len__(self) -> int:
        return self._bands.total() if self._bands else 0

    def __iter__(self) -> Iterator[Sequence]:
        for band in self._ready.values():
            yield from band
        for sequences in self._held.values():
            yield from sequences

    @property
    def busy(self) -> bool:
        """Whether any block of a prompt is being computed."""
        return bool(self._computing)

    @property
    def ready(self) -> Sequence | None:
        """The first of the lowest band of those who have nothing to wait for any more."""
        return self._ready[min(self._ready)][0] if self._ready else None

    def is_ready(self, sequence: Sequence) -> bool:
        """Whether a sequence is the first of its band of those who have nothing to wait for."""
        band = self._ready.get(sequence.request.priority)
        return band is not None and band[0] is sequence

    def up_to(self, priority: int) -> int:
        """Count those who wait in this band and in those that go before it."""
        return sum(count for band, count in self._bands.items() if band <= priority)

    def begin(self, sequence: Sequence, digests: Seq[bytes]) -> None:
        """Take note of the blocks that a sequence is going to compute."""
        for digest in digests:
            self._computing.setdefault(digest, sequence)

    def done(self, digest: bytes) -> None:
        """Take note that a block is computed, or will not be."""
        self._computing.pop(digest, None)
        if self._held:
            for sequence in self._held.pop(digest, ()):
                self._ready.setdefault(sequence.request.priority, deque()).append(sequence)

    def left(self, sequence: Sequence) -> None:
        """Take note that a sequence gives up its slot, whatever it has computed."""
        # whoever decodes has no block of its prompt left to compute
        if not sequence.decoding:
            for digest in sequence.digests:
                if self._computing.get(digest) is sequence:
                    self.done(digest)

    def awaited(self, digests: Seq[bytes]) -> bytes | None:
        """Return the last of these blocks that is being computed."""
        if self._computing.keys().isdisjoint(digests):
            return None
        return next(digest for digest in reversed(digests) if digest in self._computing)

    def hold(self, sequence: Sequence, awaited: bytes) -> None:
        """Make a sequence wait for a block."""
        self._held.setdefault(awaited, []).append(sequence)
        self._bands[sequence.request.priority] += 1

    def let_go(self, sequence: Sequence) -> None:
        """Take out a sequence that is ready."""
        priority = sequence.request.priority
        first = self._ready[priority].popleft()
        assert first is sequence, "took out of turn"
        if not self._ready[priority]:
            del self._ready[priority]
        self._bands[priority] -= 1
        if not self._bands[priority]:
            del self._bands[priority]

    def check(self, running: Seq[Sequence]) -> None:
        """Raise AssertionError unless all who wait do so for a block that will be computed."""
        assert self._held.keys() <= self._computing.keys(), "a sequence waits for nothing"
        for digest, sequence in self._computing.items():
            assert sequence in running, "who computes a block does not run"
            assert not sequence.decoding, "a block is being computed by a decode"
            assert digest in sequence.digests, "a sequence computes a block of another prompt"
        bands = Counter(sequence.request.priority for sequence in self)
        assert bands == self._bands, "the bands of those who wait were miscounted"
