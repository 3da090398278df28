"""Add up the numbers of several workers into those of one run. Pure: knows no clock or file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from jobrunner.console.rows import EXAMPLES
from jobrunner.console.snapshot import BandLatency, Snapshot

Numbers = Mapping[str, Any]

# how a field of a snapshot comes from those of the workers; what is in none of these is computed
# from others below
_SUMS = (
    "rows_this_run duplicates output_tokens prompt_tokens steps busy_s prefill_time_s decode_time_s"
    " preemptions tokens_computed prefill_tokens decode_tokens context_tokens tokens_recomputed"
    " tokens_cached recompute_s swapped_blocks swap_s swap_overhead_s stop_rows length_rows"
    " repetition_rows cost least_time_s attended_tokens out_of_memory"
).split()
# of those that are at work now
_SUMS_NOW = (
    "recent_output_tokens_per_s recent_total_tokens_per_s running waiting batch_size"
    " peak_memory_bytes device_memory_bytes"
).split()
# of percentiles the worst: they cannot be added up
_MOST = (
    "rows_total rows_done shards_total shards_done batch_size_max kv_use_peak longest_gap_s"
    " queue_p50_s queue_p95_s queue_p99_s prefill_p50_s prefill_p95_s prefill_p99_s"
    " decode_p50_s decode_p95_s decode_p99_s latency_p50_s latency_p95_s latency_p99_s"
).split()
# of limits those of the worker that has least room
_LEAST = ("token_budget", "max_batch_size")
# means, weighed by another field
_MEANS = {
    "utilization": "steps",
    "padding_efficiency": "tokens_computed",
    "both_kinds_share": "steps",
    "fused_fraction": "busy_s",
    "batch_size_mean": "steps",
    "waiting_mean": "steps",
    "speed_up": "steps",
    "parallel_fraction": "steps",
    "speed_up_ceiling": "steps",
    "queue_mean_s": "rows_this_run",
    "queue_wait_estimate_s": "rows_this_run",
    "prefill_mean_s": "rows_this_run",
    "decode_mean_s": "rows_this_run",
    "overhead_mean_s": "rows_this_run",
    "roofline_fraction": "busy_s",
}


class Total:
    """The sum over the workers of one command; each says its numbers now and then.

    A worker that was started again counts on: what its earlier lives did was done.
    """

    def __init__(self) -> None:
        self._started_s = math.inf
        self._now: dict[int, Numbers] = {}
        self._past: list[Numbers] = []
        # rows and errors of earlier runs, as the workers found them
        self._rows_before: int | None = None
        self._errors_before: int | None = None
        self._ended = False

    def hear(self, worker: int, numbers: Numbers, now_s: float) -> None:
        """Take what a worker says of its run so far, under the names of a snapshot's fields.

        Time counts from when the first of them had its model loaded.
        """
        self._started_s = min(self._started_s, now_s - numbers["elapsed_s"])
        rows = numbers["rows_done"] - numbers["rows_this_run"]
        errors = numbers["errors"] - sum(numbers["errors_by_kind"].values())
        self._rows_before = min(rows, rows if self._rows_before is None else self._rows_before)
        self._errors_before = min(
            errors, errors if self._errors_before is None else self._errors_before
        )
        self._now[worker] = numbers

    def left(self, worker: int) -> None:
        """Take note that a worker's process has ended."""
        if worker in self._now:
            self._past.append(self._now.pop(worker))

    def ended(self) -> None:
        """Take note that nothing runs any more."""
        for worker in list(self._now):
            self.left(worker)

    @property
    def known(self) -> bool:
        """Some worker has said something."""
        return self._rows_before is not None

    def snapshot(self, now_s: float) -> Snapshot:
        """The numbers of all workers together; there must be some."""
        now, ever = list(self._now.values()), [*self._past, *self._now.values()]
        elapsed_s = max(0.0, now_s - self._started_s)
        found: dict[str, Any] = {field.name: None for field in fields(Snapshot)}
        found |= {name: _sum(ever, name) for name in _SUMS}
        found |= {name: _sum(now, name) or 0 for name in _SUMS_NOW}
        found |= {name: _most(ever, name) for name in _MOST}
        found |= {name: min(_known(ever, name), default=None) for name in _LEAST}
        found |= {name: _mean(ever, name, weight) for name, weight in _MEANS.items()}
        found |= self._rows(found, ever)
        found |= _errors(ever, self._errors_before or 0)
        found |= _speed(found, now, elapsed_s)
        found |= _rest(found, now, ever)
        return Snapshot(**found)

    def _rows(self, found: Numbers, ever: Sequence[Numbers]) -> dict[str, Any]:
        done = max(found["rows_done"], (self._rows_before or 0) + found["rows_this_run"])
        done = min(done, found["rows_total"])
        percent = 100.0 * done / found["rows_total"] if found["rows_total"] else 100.0
        shards = [numbers["shard"] for numbers in ever if numbers["shard"] is not None]
        return {"rows_done": done, "percent": percent, "shard": shards[-1] if shards else None}


def _errors(ever: Sequence[Numbers], before: int) -> dict[str, Any]:
    kinds: Counter[str] = Counter()
    examples: dict[str, tuple[str, ...]] = {}
    for numbers in ever:
        kinds.update(numbers["errors_by_kind"])
        for kind, messages in numbers["error_examples"].items():
            examples[kind] = (*examples.get(kind, ()), *messages)[:EXAMPLES]
    return {
        "errors": before + kinds.total(),
        "errors_by_kind": dict(kinds),
        "error_examples": examples,
    }


def _speed(found: Numbers, now: Sequence[Numbers], elapsed_s: float) -> dict[str, Any]:
    tokens = found["prompt_tokens"] + found["output_tokens"]
    # each says how long it would take by itself: together they add up their speeds
    speeds = [1 / numbers["eta_s"] for numbers in now if numbers["eta_s"]]
    eta_s = 1 / sum(speeds) if speeds else None
    return {
        "elapsed_s": elapsed_s,
        "rows_per_s": _rate(found["rows_this_run"], elapsed_s),
        "output_tokens_per_s": _rate(found["output_tokens"], elapsed_s),
        "total_tokens_per_s": _rate(tokens, elapsed_s),
        "eta_s": 0.0 if found["rows_done"] == found["rows_total"] else eta_s,
    }


def _rest(found: Numbers, now: Sequence[Numbers], ever: Sequence[Numbers]) -> dict[str, Any]:
    histogram = [0] * max(len(numbers["batch_size_histogram"]) for numbers in ever)
    for numbers in ever:
        for place, steps in enumerate(numbers["batch_size_histogram"]):
            histogram[place] += steps
    ends = found["stop_rows"] + found["length_rows"] + found["repetition_rows"]
    tokens = found["prompt_tokens"] + found["output_tokens"]
    cost, rows = found["cost"], found["rows_this_run"]
    return {
        "batch_size_histogram": tuple(histogram),
        "latency_by_priority": _by_priority(ever),
        "kv_use": _plain_mean(now, "kv_use"),
        "device_utilization": _plain_mean(now or ever, "device_utilization"),
        "device_memory_bytes": found["device_memory_bytes"] or None,
        "stop_share": found["stop_rows"] / ends if ends else None,
        "cost_per_row": cost / rows if cost is not None and rows else None,
        "cost_per_million_tokens": cost / (tokens / 1e6) if cost is not None and tokens else None,
    }


def _by_priority(numbers: Iterable[Numbers]) -> tuple[BandLatency, ...]:
    """By priority, too, the worst percentiles of all."""
    bands: dict[int, list[Numbers]] = {}
    for each in numbers:
        for band in each["latency_by_priority"]:
            bands.setdefault(band["priority"], []).append(band)
    return tuple(
        BandLatency(
            priority,
            _sum(found, "samples"),
            *(_most(found, name) for name in ("p50_s", "p95_s", "p99_s")),
        )
        for priority, found in sorted(bands.items())
    )


def _known(numbers: Iterable[Numbers], name: str) -> list[Any]:
    return [value for each in numbers if (value := each[name]) is not None]


def _sum(numbers: Iterable[Numbers], name: str) -> Any:
    known = _known(numbers, name)
    return sum(known) if known else None


def _most(numbers: Iterable[Numbers], name: str) -> Any:
    return max(_known(numbers, name), default=None)


def _plain_mean(numbers: Iterable[Numbers], name: str) -> float | None:
    known = _known(numbers, name)
    return sum(known) / len(known) if known else None


def _mean(numbers: Iterable[Numbers], name: str, weight: str) -> float | None:
    weighed = [(each[name], each[weight]) for each in numbers if each[name] is not None]
    whole = sum(weight for _, weight in weighed)
    return sum(value * weight for value, weight in weighed) / whole if whole else None


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
