"""Know which blocks of prompts are being computed, and who waits for them. Knows no memory."""

from __future__ import annotations

from collections import deque
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
        self._ready: deque[Sequence] = deque()

    def __len__(self) -> int:
        # asked many times a step, while mostly nobody is held
        held = sum(map(len, self._held.values())) if self._held else 0
        return len(self._ready) + held

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._ready
        for sequences in self._held.values():
            yield from sequences

    @property
    def busy(self) -> bool:
        """Whether any block of a prompt is being computed."""
        return bool(self._computing)

    @property
    def ready(self) -> Sequence | None:
        """The first who has nothing to wait for any more."""
        return self._ready[0] if self._ready else None

    def begin(self, sequence: Sequence, digests: Seq[bytes]) -> None:
        """Take note of the blocks that a sequence is going to compute."""
        for digest in digests:
            self._computing.setdefault(digest, sequence)

    def done(self, digest: bytes) -> None:
        """Take note that a block is computed, or will not be."""
        self._computing.pop(digest, None)
        if self._held:
            self._ready.extend(self._held.pop(digest, ()))

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

    def let_go(self) -> Sequence:
        """Take out who is ready."""
        return self._ready.popleft()

    def check(self, running: Seq[Sequence]) -> None:
        """Raise AssertionError unless all who wait do so for a block that will be computed."""
        assert self._held.keys() <= self._computing.keys(), "a sequence waits for nothing"
        for digest, sequence in self._computing.items():
            assert sequence in running, "who computes a block does not run"
            assert not sequence.decoding, "a block is being computed by a decode"
            assert digest in sequence.digests, "a sequence computes a block of another prompt"
