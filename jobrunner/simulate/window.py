"""What a simulation did between its first full batch and its last admission. Pure counting."""

from __future__ import annotations

from dataclasses import dataclass, field

from jobrunner.simulate.virtual import Moment


@dataclass(frozen=True, slots=True)
class Middle:
    """The steps from the first full batch to the last admission; None where there are none.

    A batch is full when every slot is taken, or when rows wait and none joins though the token
    budget would have room. `utilization` is Σ batch size / Σ slots of the steps, `kv_use` the mean
    share of KV blocks in use; `tail_s` the time from the last admission to the end, in which the
    batch only shrinks, and `tail_share` that of the whole.
    """

    utilization: float | None
    kv_use: float | None
    steps: int
    tail_s: float
    tail_share: float | None
    #: Σ KV use / steps, over all steps
    kv_use_mean: float | None


@dataclass(slots=True)
class _Sums:
    steps: int = 0
    slots: int = 0
    batch: int = 0
    kv_use: float = 0.0

    def add(self, other: _Sums) -> None:
        self.steps += other.steps
        self.slots += other.slots
        self.batch += other.batch
        self.kv_use += other.kv_use


@dataclass(slots=True)
class _Worker:
    full: bool = False
    #: since the last admission, and from the first full batch up to it
    since: _Sums = field(default_factory=_Sums)
    inside: _Sums = field(default_factory=_Sums)


class Window:
    """Finds the middle of a simulation while its moments go by, in constant memory."""

    def __init__(self) -> None:
        self._workers: dict[int, _Worker] = {}
        self._all = _Sums()
        self._last_admission_s = 0.0
        self._ended_s = 0.0

    def observe(self, moment: Moment) -> None:
        """Take in one step of one worker."""
        step = moment.step
        self._ended_s = max(self._ended_s, moment.ended_s)
        if step.idle:
            return
        slots = moment.limits.max_batch_size
        sums = _Sums(1, slots, step.batch_size, step.kv_blocks_used / step.kv_blocks)
        self._all.add(sums)
        worker = self._workers.setdefault(moment.worker, _Worker())
        worker.full = worker.full or _is_full(moment)
        if worker.full:
            worker.since.add(sums)
        if moment.joined:
            self._last_admission_s = max(self._last_admission_s, moment.started_s)
            worker.inside.add(worker.since)
            worker.since = _Sums()

    def middle(self) -> Middle:
        """The numbers of all workers together, as far as moments have gone by."""
        inside = _Sums()
        for worker in self._workers.values():
            inside.add(worker.inside)
        tail_s = self._ended_s - self._last_admission_s
        return Middle(
            utilization=_ratio(inside.batch, inside.slots),
            kv_use=_ratio(inside.kv_use, inside.steps),
            steps=inside.steps,
            tail_s=tail_s,
            tail_share=_ratio(tail_s, self._ended_s),
            kv_use_mean=_ratio(self._all.kv_use, self._all.steps),
        )


def _is_full(moment: Moment) -> bool:
    step = moment.step
    if step.running >= moment.limits.max_batch_size:
        return True
    room = step.tokens_computed < moment.limits.token_budget
    return room and step.waiting > 0 and not moment.joined


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
