"""Decide when sequences may join a batch and leave it. Knows nothing of blocks or tokens."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class Door:
    """What a policy sees.

    `occupied` slots, of them `finished` by sequences that keep their place. Of new sequences,
    `waiting` wait, the longest for `oldest_wait_s`, and `gone` have left the queue so far;
    `returning` ones have been in before. `last_call`: nobody else will come; `crowded`: nobody
    else can, because the window is full or a row has waited up to the starvation limit.
    """

    slots: int
    occupied: int
    waiting: int
    oldest_wait_s: float
    last_call: bool
    finished: int = 0
    gone: int = 0
    returning: int = 0
    crowded: bool = False


class Policy(Protocol):
    """When sequences may join and leave; `together`: a finished one stays until all have.

    Those who return after a preemption are not asked for: they may always join.
    """

    @property
    def together(self) -> bool: ...

    def joining(self, door: Door) -> int:
        """How many new sequences may join now, as far as there are slots."""

    def opens_in_s(self, door: Door) -> float:
        """After how long those who wait may join though nothing else happens."""

    def ended(self, door: Door) -> bool:
        """Whether those who finished may leave now."""


class Continuous:
    """Whoever waits joins as soon as a slot is free, and leaves when it is done.

    S_t = S_{t−1} \\ F_t ∪ N_t.
    """

    together = False

    def joining(self, door: Door) -> int:
        return door.waiting

    def opens_in_s(self, door: Door) -> float:
        return 0.0

    def ended(self, door: Door) -> bool:
        return True


class Gathering:
    """Opens when so many wait, when the oldest has waited so long, or when nobody will come.

    Without `preferred_batch_size` only the time counts; at a `max_queue_delay_s` of 0 nobody waits.
    """

    def __init__(self, preferred_batch_size: int | None, max_queue_delay_s: float) -> None:
        self._preferred = preferred_batch_size
        self._delay_s = max_queue_delay_s

    def opens(self, door: Door) -> bool:
        if door.waiting == 0:
            return False
        enough = self._preferred is not None and door.waiting >= self._preferred
        return enough or self.opens_in_s(door) == 0 or door.last_call or door.crowded

    def opens_in_s(self, door: Door) -> float:
        return max(0.0, self._delay_s - door.oldest_wait_s) if door.waiting else math.inf


class Gated:
    """Continuous behind a door: all who wait when it opens may join, as slots become free."""

    together = False

    def __init__(self, gathering: Gathering) -> None:
        self._gathering = gathering
        # so many have gone when all are through who were let in
        self._until = 0

    def joining(self, door: Door) -> int:
        if self._gathering.opens(door):
            self._until = door.gone + door.waiting
        return max(0, self._until - door.gone)

    def opens_in_s(self, door: Door) -> float:
        return self._gathering.opens_in_s(door)

    def ended(self, door: Door) -> bool:
        return True


class Batches(ABC):
    """A batch forms when no slot is occupied and its rule says so, and leaves as a whole.

    What the token budget or the memory does not let in at once joins in later steps; the batch
    lasts until all of it are finished: T_batch = max tᵣ where all of it start at once.
    """

    together = True

    def __init__(self) -> None:
        self._until = 0

    def joining(self, door: Door) -> int:
        if self.ended(door) and door.occupied == 0 and self.forms(door):
            self._until = door.gone + min(door.waiting, door.slots)
        return max(0, self._until - door.gone)

    def ended(self, door: Door) -> bool:
        return door.occupied == door.finished and not door.returning and door.gone >= self._until

    def opens_in_s(self, door: Door) -> float:
        return math.inf

    @abstractmethod
    def forms(self, door: Door) -> bool:
        """Whether those who wait are a batch."""


class Static(Batches):
    """A full batch starts; a smaller one only where nobody else comes."""

    def forms(self, door: Door) -> bool:
        return door.waiting >= door.slots or door.last_call or door.crowded


class Dynamic(Batches):
    """A batch forms at the preferred size or when the oldest has waited long enough."""

    def __init__(self, gathering: Gathering) -> None:
        super().__init__()
        self._gathering = gathering

    def forms(self, door: Door) -> bool:
        return door.waiting >= door.slots or self._gathering.opens(door)

    def opens_in_s(self, door: Door) -> float:
        return self._gathering.opens_in_s(door) if door.occupied == 0 else math.inf


def policy_named(
    name: Literal["continuous", "static", "dynamic"],
    *,
    preferred_batch_size: int | None = None,
    max_queue_delay_s: float = 0.0,
) -> Policy:
    """Make the policy of a job file's `[batching]`."""
    gathering = Gathering(preferred_batch_size, max_queue_delay_s)
    if name == "static":
        return Static()
    if name == "dynamic":
        return Dynamic(gathering)
    if max_queue_delay_s > 0:
        return Gated(gathering)
    return Continuous()
