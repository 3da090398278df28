"""Count the numbers that the user sees. Knows no clock, file or terminal."""

from __future__ import annotations

import resource
import sys
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NamedTuple

from jobrunner.console.cost_model import CostModel, SpeedUp
from jobrunner.console.machine import MachineLimits
from jobrunner.console.quantiles import Quantiles
from jobrunner.console.rows import Errors, OpenRows
from jobrunner.console.snapshot import BandLatency, Snapshot, Totals
from jobrunner.records import Completion, RowError, RowId, Step

RECENT_S = 30.0
_PERCENTILES = (50, 95, 99)
MOST_BANDS = 32
_SAMPLE_EVERY_S = 1.0  # so the recent window holds some thirty samples, however fast the steps


class _Sample(NamedTuple):
    now_s: float
    output_tokens: int
    total_tokens: int


def peak_memory_bytes() -> int:
    """The most memory this process ever had resident, as the kernel counts it."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def no_device_memory() -> None:
    """Stand for the memory of a device that has none of its own."""


class Stats:
    """Counts steps and finished rows; `snapshot` computes the numbers from the counts.

    Memory is bounded: it does not grow with rows, steps or shards. `slots` is the configured
    `max_batch_size`, None under auto. `started_s` and each `now_s` are seconds of one clock.
    `limits` are the needs of the model and the rates of the machine, where they were measured.
    """

    def __init__(
        self,
        totals: Totals,
        *,
        slots: int | None,
        started_s: float,
        price_per_gpu_hour: float | None = None,
        limits: MachineLimits | None = None,
        peak_memory: Callable[[], int] = peak_memory_bytes,
        device_memory: Callable[[], int | None] = no_device_memory,
    ) -> None:
        self._totals = totals
        self._slots = slots
        self._started_s = started_s
        self._price_per_gpu_hour = price_per_gpu_hour
        self._limits = limits
        self._peak_memory = peak_memory
        self._device_memory = device_memory
        self._rows = 0
        self._open_rows = OpenRows()
        self._row_tokens = 0  # prompt + output of the rows this run finished
        self._errors = Errors()
        self._shards_done = totals.shards_done_before
        self._rows_known = totals.rows_done_before
        self._shard: str | None = None
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._steps = 0
        self._active = 0  # Σ batch size
        self._waiting = 0  # Σ waiting
        self._fused_steps = 0
        self._batch_size_max = 0
        self._batch_sizes: list[int] = []
        self._tokens_computed = 0
        self._prefill_tokens = 0
        self._decode_tokens = 0
        self._context_tokens = 0
        self._attended_tokens = 0
        self._tokens_padded = 0
        self._tokens_recomputed = 0
        self._tokens_cached = 0
        self._preemptions = 0
        self._out_of_memory = 0
        self._limits_now: tuple[int | None, int | None] = None, None
        self._swapped_blocks = 0
        self._swap_s = 0.0
        self._duplicates = 0
        self._kv_use_peak: float | None = None
        self._forward_s = 0.0
        self._busy_s = 0.0
        self._least_s = 0.0
        self._cost_model = CostModel()
        self._speed_up = SpeedUp()
        self._latest = Step()
        self._queue = Quantiles()
        self._prefill = Quantiles()
        self._decode = Quantiles()
        self._latency = Quantiles()
        self._bands: dict[int, Quantiles] = {}
        self._longest_gap_s = 0.0
        self._finish_reasons: Counter[str | None] = Counter()
        self._samples = deque([_Sample(started_s, 0, 0)])

    def observe(self, step: Step, now_s: float) -> None:
        """Count one step of the engine and the rows that it completed."""
        self._latest = step
        self._output_tokens += step.output_tokens
        self._tokens_computed += step.tokens_computed
        self._prefill_tokens += step.prefill_tokens
        self._decode_tokens += step.decode_tokens
        self._context_tokens += step.context_tokens
        self._attended_tokens += step.attended_tokens
        self._tokens_padded += step.tokens_padded
        self._tokens_recomputed += step.tokens_recomputed
        self._tokens_cached += step.tokens_cached
        self._preemptions += step.preemptions
        if step.token_budget:
            self._out_of_memory = step.out_of_memory
            self._limits_now = step.token_budget, step.max_batch_size
        self._swapped_blocks += step.swapped_blocks
        self._swap_s += step.swap_s
        self._duplicates += step.duplicates
        if (kv_use := _ratio(step.kv_blocks_used, step.kv_blocks)) is not None:
            self._kv_use_peak = max(kv_use, self._kv_use_peak or 0.0)
        if not step.idle:
            self._count_batch(step)
        for completion in step.completions:
            self._count_completion(completion)
        self._sample(now_s)

    def row_failed(self, error: RowError, row: RowId) -> None:
        """Count a row that became an error, before it reached the engine or in it."""
        self._rows += 1
        self._errors.add(error, row)

    def ended(self) -> None:
        """Take note that the engine runs nothing any more."""
        self._latest = Step(kv_blocks=self._latest.kv_blocks)

    def shard_started(self, shard: str) -> None:
        """Take note that a span of this shard was begun."""
        self._shard = shard

    def known(self, rows_done: int, shards_done: int) -> None:
        """Take note of what all workers together have finished, as the run directory says."""
        self._rows_known = max(self._rows_known, rows_done)
        self._shards_done = max(self._shards_done, shards_done)

    def snapshot(self, now_s: float) -> Snapshot:
        """Compute the numbers as they are at `now_s`; counts nothing."""
        elapsed_s = max(0.0, now_s - self._started_s)
        return Snapshot(
            elapsed_s=elapsed_s,
            **self._progress(),
            **self._speed(now_s, elapsed_s),
            **self._batches(),
            **self._times(),
            **self._memory(),
            **self._latencies(),
            **self._endings(),
            **self._money(),
        )

    @property
    def _total_tokens(self) -> int:
        return self._prompt_tokens + self._output_tokens

    @property
    def _rows_done(self) -> int:
        done = max(self._rows_known, self._totals.rows_done_before + self._rows)
        return min(self._totals.rows, done)

    @property
    def _fused_fraction(self) -> float | None:
        return _ratio(self._forward_s, self._busy_s)

    def _progress(self) -> dict[str, Any]:
        totals, rows_done = self._totals, self._rows_done
        return {
            "rows_total": totals.rows,
            "rows_done": rows_done,
            "rows_this_run": self._rows,
            "duplicates": self._duplicates,
            "percent": 100.0 * rows_done / totals.rows if totals.rows else 100.0,
            "errors": totals.errors_before + self._errors.total,
            "errors_by_kind": self._errors.by_kind,
            "error_examples": self._errors.examples,
            "shards_total": totals.shards,
            "shards_done": self._shards_done,
            "shard": self._shard,
        }

    def _speed(self, now_s: float, elapsed_s: float) -> dict[str, Any]:
        recent_output, recent_total = self._recent(now_s)
        total_tokens_per_s = _rate(self._total_tokens, elapsed_s)
        return {
            "rows_per_s": _rate(self._rows, elapsed_s),
            "device_utilization": _ratio(self._forward_s, elapsed_s),
            "output_tokens": self._output_tokens,
            "prompt_tokens": self._prompt_tokens,
            "output_tokens_per_s": _rate(self._output_tokens, elapsed_s),
            "total_tokens_per_s": total_tokens_per_s,
            "recent_output_tokens_per_s": recent_output,
            "recent_total_tokens_per_s": recent_total,
            "eta_s": self._eta_s(self._totals.rows - self._rows_done, total_tokens_per_s),
        }

    def _batches(self) -> dict[str, Any]:
        law = self._speed_up.law()
        real_tokens = self._tokens_computed - self._tokens_padded
        return {
            "steps": self._steps,
            "utilization": _ratio(
                self._active, (self._slots or self._batch_size_max) * self._steps
            ),
            "padding_efficiency": _ratio(real_tokens, self._tokens_computed),
            "both_kinds_share": _ratio(self._fused_steps, self._steps),
            "batch_size": self._latest.batch_size,
            "batch_size_mean": _ratio(self._active, self._steps),
            "batch_size_max": self._batch_size_max,
            "batch_size_histogram": tuple(self._batch_sizes),
            "speed_up": law and self._speed_up.gained(law),
            "parallel_fraction": law and law.parallel_fraction,
            "speed_up_ceiling": law and law.ceiling,
            "running": self._latest.running,
            "waiting": self._latest.waiting,
            "waiting_mean": _ratio(self._waiting, self._steps),
        }

    def _times(self) -> dict[str, Any]:
        """What the time of the steps went into, and the least it could have been."""
        cost = self._cost_model.cost()
        prefill_s, decode_s = self._cost_model.split(cost) or (None, None)
        recompute_s = cost.prefill_s * self._tokens_recomputed if cost else None
        if not self._tokens_recomputed:
            recompute_s = 0.0
        least_s = self._least_s if self._limits else None
        return {
            "busy_s": self._busy_s,
            "prefill_time_s": prefill_s,
            "decode_time_s": decode_s,
            "fused_fraction": self._fused_fraction,
            "recompute_s": recompute_s,
            "swapped_blocks": self._swapped_blocks,
            "swap_s": self._swap_s,
            "swap_overhead_s": _sum(self._swap_s, recompute_s),
            "least_time_s": least_s,
            "roofline_fraction": None if least_s is None else _ratio(least_s, self._busy_s),
        }

    def _memory(self) -> dict[str, Any]:
        return {
            "kv_use": _ratio(self._latest.kv_blocks_used, self._latest.kv_blocks),
            "kv_use_peak": self._kv_use_peak,
            "out_of_memory": self._out_of_memory,
            "token_budget": self._limits_now[0],
            "max_batch_size": self._limits_now[1],
            "preemptions": self._preemptions,
            "tokens_computed": self._tokens_computed,
            "prefill_tokens": self._prefill_tokens,
            "decode_tokens": self._decode_tokens,
            "context_tokens": self._context_tokens,
            "attended_tokens": self._attended_tokens,
            "tokens_recomputed": self._tokens_recomputed,
            "tokens_cached": self._tokens_cached,
            "peak_memory_bytes": self._peak_memory(),
            "device_memory_bytes": self._device_memory(),
        }

    def _latencies(self) -> dict[str, Any]:
        in_engine_s = _sum(self._prefill.mean(), self._decode.mean())
        waiting, sequences = _ratio(self._waiting, self._steps), _ratio(self._active, self._steps)
        fused = self._fused_fraction
        return {
            "queue_mean_s": self._queue.mean(),
            **_percentiles("queue", self._queue),
            "queue_wait_estimate_s": _ratio(_product(waiting, in_engine_s), sequences),
            "prefill_mean_s": self._prefill.mean(),
            **_percentiles("prefill", self._prefill),
            "decode_mean_s": self._decode.mean(),
            **_percentiles("decode", self._decode),
            "overhead_mean_s": _product(in_engine_s, None if fused is None else 1.0 - fused),
            **_percentiles("latency", self._latency),
            "latency_by_priority": self._by_priority(),
            "longest_gap_s": self._longest_gap_s,
        }

    def _endings(self) -> dict[str, Any]:
        reasons = self._finish_reasons
        return {
            "stop_rows": reasons["stop"],
            "length_rows": reasons["length"],
            "repetition_rows": reasons["repetition"],
            "stop_share": _ratio(reasons["stop"], reasons.total()),
        }

    def _money(self) -> dict[str, Any]:
        cost = _product(self._price_per_gpu_hour, self._busy_s / 3600)
        return {
            "cost": cost,
            "cost_per_row": _ratio(cost, self._rows),
            "cost_per_million_tokens": _ratio(cost, self._total_tokens / 1e6),
        }

    def _count_batch(self, step: Step) -> None:
        self._steps += 1
        self._active += step.batch_size
        self._waiting += step.waiting
        self._fused_steps += step.prefill_tokens > 0 and step.decode_tokens > 0
        self._batch_size_max = max(self._batch_size_max, step.batch_size)
        bucket = step.batch_size.bit_length() - 1
        self._batch_sizes += [0] * (bucket + 1 - len(self._batch_sizes))
        self._batch_sizes[bucket] += 1
        self._forward_s += step.forward_s
        self._busy_s += step.step_s
        self._cost_model.add(step)
        self._speed_up.add(step)
        if self._limits is not None:
            self._least_s += self._limits.least_s(step)

    def _count_completion(self, completion: Completion) -> None:
        if completion.error is None:
            self._count_sample(completion)
        row = self._open_rows.add(completion)
        if row is None:
            return
        if row.error is not None:
            self.row_failed(row.error, completion.id)
            return
        self._rows += 1
        self._row_tokens += row.tokens
        self._prompt_tokens += completion.prompt_tokens

    def _count_sample(self, completion: Completion) -> None:
        self._finish_reasons[completion.finish_reason] += 1
        self._queue.add(completion.queue_s)
        self._prefill.add(completion.prefill_s)
        self._decode.add(completion.decode_s)
        latency_s = completion.queue_s + completion.prefill_s + completion.decode_s
        self._latency.add(latency_s)
        self._count_in_band(completion, latency_s)
        self._longest_gap_s = max(self._longest_gap_s, completion.longest_gap_s)

    def _count_in_band(self, completion: Completion, latency_s: float) -> None:
        priority = 0 if completion.request is None else completion.request.priority
        if priority not in self._bands and len(self._bands) < MOST_BANDS:
            self._bands[priority] = Quantiles()
        if priority in self._bands:
            self._bands[priority].add(latency_s)

    def _by_priority(self) -> tuple[BandLatency, ...]:
        if len(self._bands) < 2:
            return ()
        return tuple(
            BandLatency(band, found.count, *(found.at(p / 100) for p in _PERCENTILES))
            for band, found in sorted(self._bands.items())
        )

    def _eta_s(self, rows_left: int, total_tokens_per_s: float) -> float | None:
        if rows_left == 0:
            return 0.0
        if self._row_tokens == 0 or total_tokens_per_s == 0.0:
            return None
        return rows_left * (self._row_tokens / self._rows) / total_tokens_per_s

    def _sample(self, now_s: float) -> None:
        if now_s - self._samples[-1].now_s < _SAMPLE_EVERY_S:
            return
        self._samples.append(_Sample(now_s, self._output_tokens, self._total_tokens))
        while self._samples[1].now_s <= now_s - RECENT_S:
            self._samples.popleft()

    def _recent(self, now_s: float) -> tuple[float, float]:
        # the latest sample that is old enough, or else the oldest there is
        since = self._samples[0]
        for sample in self._samples:
            if sample.now_s > now_s - RECENT_S:
                break
            since = sample
        span_s = now_s - since.now_s
        return (
            _rate(self._output_tokens - since.output_tokens, span_s),
            _rate(self._total_tokens - since.total_tokens, span_s),
        )


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _percentiles(name: str, durations: Quantiles) -> dict[str, float | None]:
    return {f"{name}_p{p}_s": durations.at(p / 100) for p in _PERCENTILES}


# what is not known makes unknown what is computed from it


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole is not None and whole > 0 else None


def _product(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a * b


def _sum(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b
