"""Turn a comparison into a table for a person, or an object for a program. Pure."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jobrunner.commands.compare_runs import GENERATE, Result, Run
from jobrunner.commands.compare_texts import Texts
from jobrunner.commands.figures import latency_lines, number, share
from jobrunner.console.snapshot import Snapshot

if TYPE_CHECKING:
    from jobrunner.commands.compare import Comparison

# what `generate` does not tell: it has no host to wait for, no blocks and no queue
_NOT_OF_GENERATE = frozenset(
    "fused_fraction kv_use kv_use_peak prefill_time_s decode_time_s overhead_mean_s"
    " speed_up parallel_fraction speed_up_ceiling recompute_s swap_overhead_s"
    " context_tokens attended_tokens waiting_mean queue_wait_estimate_s".split()
)
# what is over when everything has run
_MOMENTARY = frozenset(
    "percent eta_s shard shards_total shards_done batch_size running waiting kv_use"
    " recent_output_tokens_per_s recent_total_tokens_per_s device_memory_bytes"
    " peak_memory_bytes least_time_s roofline_fraction token_budget max_batch_size".split()
)
_TEXTS_SHOWN = 32

Said = Callable[[Result], str]


def ratios(result: Result, base: Result) -> dict[str, float | None]:
    """How a contender stands to another, in the middle of the repeats; None without a base."""

    def ratio(number: Callable[[Snapshot], float | None]) -> float | None:
        pairs = [
            (number(ours.snapshot), number(theirs.snapshot))
            for ours, theirs in zip(result.runs, base.runs, strict=True)
        ]
        found = [ours / theirs for ours, theirs in pairs if ours is not None and theirs]
        return statistics.median(found) if found else None

    return {
        "rows_per_s": ratio(lambda s: s.rows_per_s),
        "output_tokens_per_s": ratio(lambda s: s.output_tokens_per_s),
        "total_tokens_per_s": ratio(lambda s: s.total_tokens_per_s),
        "latency_p50_s": ratio(lambda s: s.latency_p50_s),
        "latency_p99_s": ratio(lambda s: s.latency_p99_s),
        "longest_gap_s": ratio(lambda s: s.longest_gap_s),
        "cost_per_row": ratio(lambda s: s.cost_per_row),
    }


def as_json(comparison: Comparison) -> dict[str, Any]:
    """All numbers as one JSON object, under the names that they have in `metrics.jsonl`."""
    base = _base(comparison)
    return {
        **_plain_fields(comparison),
        "ratios_to": base.contender.name,
        "contenders": [_fields(result, base) for result in comparison.results],
        "texts": _texts_fields(comparison.texts),
    }


def _plain_fields(comparison: Comparison) -> dict[str, Any]:
    names = [field.name for field in fields(comparison) if field.name not in ("results", "texts")]
    return {name: getattr(comparison, name) for name in names}


def _base(comparison: Comparison) -> Result:
    """What the others are compared with: static, or else the first."""
    return comparison.results[0]


def _fields(result: Result, base: Result) -> dict[str, Any]:
    run, generate = result.run, result.contender == GENERATE
    numbers = {k: v for k, v in asdict(run.snapshot).items() if k not in _MOMENTARY}
    if generate:
        numbers.update(dict.fromkeys(_NOT_OF_GENERATE & numbers.keys()))
    return {
        "name": result.contender.name,
        "policy": result.contender.policy,
        "chunked_prefill": result.contender.chunked,
        "limits": asdict(result.limits),
        "sweep": [asdict(tried) for tried in result.tried],
        "runs_output_tokens_per_s": [each.snapshot.output_tokens_per_s for each in result.runs],
        **numbers,
        "first_token_p50_s": run.first_token.p50_s,
        "first_token_p95_s": run.first_token.p95_s,
        "first_token_p99_s": run.first_token.p99_s,
        "kv_peak_bytes": run.kv_peak_bytes,
        "peak_memory_bytes": run.peak_bytes,
        "working_memory_bytes": run.grown_bytes,
        "ratios": ratios(result, base),
    }


def _texts_fields(texts: Texts) -> dict[str, Any]:
    return {
        "reference": texts.reference,
        "answers": texts.answers,
        "different": len(texts.differences),
        "near_tie": texts.near_tie,
        "near_ties": texts.near_ties,
        "beyond": texts.beyond,
        "largest_gap": texts.largest_gap,
        "differences": [
            {
                "name": each.name,
                "shard": each.sample.row.shard,
                "row": each.sample.row.index,
                "sample": each.sample.sample,
                "position": each.position,
                "gap": each.gap,
            }
            for each in texts.differences[:_TEXTS_SHOWN]
        ],
    }


def show(comparison: Comparison, stream: TextIO) -> None:
    """Print the table, and below it what it does not say."""
    columns = shutil.get_terminal_size((100, 24)).columns
    console = Console(file=stream, width=columns, markup=False, emoji=False, highlight=False)
    console.print(_table(comparison))
    for line in lines(comparison):
        console.print(Text(line))


def lines(comparison: Comparison) -> list[str]:
    """What was served, and whether all gave the same answers."""
    arriving = f", arriving as {comparison.arrivals}" if comparison.arrivals else ""
    failed = f" ({comparison.error_rows:,} more are errors)" if comparison.error_rows else ""
    return [
        f"{comparison.rows:,} rows{failed} of {comparison.prompt_tokens:,} prompt tokens{arriving};"
        f" {comparison.model} in {comparison.dtype} on {comparison.device}",
        f"relative: to {_base(comparison).contender.name}",
        *_generate_lines(comparison),
        _texts_line(comparison.texts),
    ]


def _generate_lines(comparison: Comparison) -> list[str]:
    by_name = {result.contender: result for result in comparison.results}
    if GENERATE not in by_name:
        return []
    ratio = ratios(_base(comparison), by_name[GENERATE])["output_tokens_per_s"]
    return [f"static has {number(ratio)} times the output tokens/s of generate on the same batches"]


def _texts_line(texts: Texts) -> str:
    if not texts.differences:
        return f"answers: all {texts.answers:,} are equal in every column"
    found = [f"answers: {len(texts.differences):,} are not those of {texts.reference}"]
    if texts.near_ties:
        found.append(
            f"{texts.near_ties:,} part at a near tie (gap of logits up to {texts.near_tie:g})"
        )
    if texts.beyond:
        found.append(f"{texts.beyond:,} at a gap beyond that, up to {texts.largest_gap:.3g}")
    unknown = len(texts.differences) - texts.near_ties - texts.beyond
    if unknown:
        found.append(f"{unknown:,} were not looked into")
    return "; ".join(found)


def _mebibytes(value: int | None) -> str:
    return "-" if value is None else f"{value / 2**20:,.0f}"


def _histogram(counts: Sequence[int]) -> str:
    """Steps by batch size: `8: 120` are those of 8 to 15."""
    found = [f"{1 << place}: {count:,}" for place, count in enumerate(counts) if count]
    return "\n".join(found) or "-"


def _ours(said: Callable[[Run], str]) -> Said:
    """What `generate` does not tell."""
    return lambda result: "-" if result.contender == GENERATE else said(result.run)


_LINES: dict[str, Said] = {
    "max_batch_size": lambda r: f"{r.limits.max_batch_size:,}",
    "rows/s": lambda r: number(r.run.snapshot.rows_per_s),
    "output tokens/s": lambda r: number(r.run.snapshot.output_tokens_per_s, 4),
    "total tokens/s": lambda r: number(r.run.snapshot.total_tokens_per_s, 4),
    "time, s": lambda r: number(r.run.snapshot.elapsed_s, 4),
    "steps": lambda r: f"{r.run.snapshot.steps:,}",
    "utilization": lambda r: share(r.run.snapshot.utilization),
    "padding efficiency": lambda r: share(r.run.snapshot.padding_efficiency),
    "fused fraction": _ours(lambda r: share(r.snapshot.fused_fraction)),
    "steps of both kinds": lambda r: share(r.run.snapshot.both_kinds_share),
    "batch size, mean": lambda r: number(r.run.snapshot.batch_size_mean),
    "steps by batch size": lambda r: _histogram(r.run.snapshot.batch_size_histogram),
    "preemptions": lambda r: f"{r.run.snapshot.preemptions:,}",
    "tokens computed again": lambda r: f"{r.run.snapshot.tokens_recomputed:,}",
    "swap overhead, s": _ours(lambda r: number(r.snapshot.swap_overhead_s)),
    "prompt tokens cached": lambda r: f"{r.run.snapshot.tokens_cached:,}",
    "row latency, p50 s": lambda r: number(r.run.snapshot.latency_p50_s),
    "row latency, p95 s": lambda r: number(r.run.snapshot.latency_p95_s),
    "row latency, p99 s": lambda r: number(r.run.snapshot.latency_p99_s),
    "longest token gap, s": lambda r: number(r.run.snapshot.longest_gap_s),
    "first token, p50 s": lambda r: number(r.run.first_token.p50_s),
    "first token, p99 s": lambda r: number(r.run.first_token.p99_s),
    "peak KV memory, MiB": lambda r: _mebibytes(r.run.kv_peak_bytes),
    "peak memory, MiB": lambda r: _mebibytes(r.run.peak_bytes),
    "of it for steps, MiB": lambda r: _mebibytes(r.run.grown_bytes),
    "cost per row": lambda r: number(r.run.snapshot.cost_per_row),
}
# of no use where nothing of it occurred
_IF_ANY = ("preemptions", "tokens computed again", "swap overhead, s", "cost per row")
_COMPARED = {"output tokens/s": "output_tokens_per_s", "row latency, p99": "latency_p99_s"}
_BEFORE_PRIORITIES = "row latency, p99 s"
_NOTHING = ("-", "0", "0.0%")


def _table(comparison: Comparison) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for result in comparison.results:
        table.add_column(result.contender.name.replace(", ", ",\n"), justify="right")
    by_priority = latency_lines([result.run.snapshot for result in comparison.results])
    for label, said in _LINES.items():
        values = [said(result) for result in comparison.results]
        if label not in _IF_ANY or any(value not in _NOTHING for value in values):
            table.add_row(label, *values)
        if label == _BEFORE_PRIORITIES:
            for more, numbers in by_priority.items():
                table.add_row(more, *numbers)
    base = _base(comparison)
    compared = [ratios(result, base) for result in comparison.results]
    table.add_section()
    for label, name in _COMPARED.items():
        values = [number(each[name]) for each in compared]
        table.add_row(f"{label}, relative", *values)
    return table
